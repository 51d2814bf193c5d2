"""Writes a page for each quantity, and the table that leads to them.

What is a matter of fact comes from elsewhere: options from the classes, cost from what
the benchmark recorded.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Dict, List, NamedTuple

from support_table import folded, list_table

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "README.md"
# networks of the benchmark
NETWORKS = ("MLP 784-512-256-10", "3C3D", "All-CNN-C", "GPT-2", "Llama", "ViT")
# what the landing page shows of the first two, as far as it was measured
CHARTS = {"mlp": NETWORKS[0], "3c3d": NETWORKS[1]}
CHARTED = """
BatchGrad BatchL2Grad Variance BatchDotGrad ClippedGrad DiagGGNMC DiagGGNExact KFAC
EKFAC KFLR DiagHessian HMP
""".split()

# what is large, and a summary that may do instead
LARGE_AND_SMALL = ["BatchGrad", "BatchL2Grad", "Variance", "SqrtGGNExact", "DiagGGNMC"]

SETUP = """
import torch
from torch.nn import CrossEntropyLoss, Linear, Sequential, Sigmoid
from backpack import backpack, extend
from backpack.extensions import {names}

model = extend(Sequential(Linear(4, 5), Sigmoid(), Linear(5, 3)))
lossfunc = extend(CrossEntropyLoss())
X, y = torch.rand(8, 4), torch.randint(3, (8,))

with backpack({calls}):
    lossfunc(model(X), y).backward()
"""


class Quantity(NamedTuple):
    """What a page says.

    Attributes:
        title: Title of the page.
        names: The extensions on it.
        fields: Where each of them saves its result.
        shapes: Which shape that has.
        short: What it is, for the table.
        definition: Definition, with mathematics.
        scale: How it changes with the loss's reduction.
        cost: What it costs, and which memory it takes.
        uses: What it is good for, with papers.
        example: Code after the backward pass.
        also: Other extensions in the example.
        arguments: What extensions in the example are made with.
    """

    title: str
    names: List[str]
    fields: List[str]
    shapes: List[str]
    short: str
    definition: str
    scale: str
    cost: str
    uses: List[str]
    example: str
    also: List[str] = []
    arguments: Dict[str, str] = {}


MEAN = "With a mean loss, it carries the factor {factor}; with a sum, none."
ROOT = r"""
The generalized Gauss-Newton matrix (GGN) is :math:`G = \sum_n J_n^\top H_n J_n`, with
the Jacobian :math:`J_n` of the network's output for sample :math:`n`, and the Hessian
:math:`H_n` of the loss with respect to that output. """

QUANTITIES = [
    Quantity(
        "Individual (per-sample) gradients: BatchGrad",
        ["BatchGrad"],
        ["grad_batch"],
        ["[N, *p]"],
        "individual gradients: the summands of ``.grad``",
        r"""The summands of the gradient, one for each sample, also known as per-example
gradients:

.. math:: g_n = c\, \nabla_p \ell_n\,, \qquad \sum_n g_n = \nabla_p \mathcal L\,.""",
        MEAN.format(factor="c = 1/N"),
        "N times the memory of the gradient. Writing them is most of the time, where "
        "layers are wide. If a summary is enough, look for a quantity that is one "
        "(norms, variance, dot products), or sum up in an ``extension_hook``.",
        [
            "Clipping for differential privacy: Abadi et al., *Deep learning with "
            "differential privacy*, 2016",
            "Influence of training samples: Pruthi et al., *Estimating training data "
            "influence by tracing gradient descent*, 2020",
        ],
        "for p in model.parameters():\n"
        "    assert p.grad_batch.shape == (8, *p.shape)\n"
        "    assert torch.allclose(p.grad_batch.sum(0), p.grad, atol=1e-6)",
    ),
    Quantity(
        "Norms of individual gradients: BatchL2Grad",
        ["BatchL2Grad"],
        ["batch_l2"],
        ["[N]"],
        "squared norms of individual gradients",
        r"""Squared Euclidean norms, for each sample and each parameter apart:

.. math:: \lVert g_n \rVert^2\,.

The norm over all parameters is the root of the sum over parameters.""",
        MEAN.format(factor="1/N²"),
        "N numbers for each parameter. No individual gradient is formed where a layer "
        "is a linear map: norms follow from its inputs and from gradients at its "
        "output.",
        [
            "Clipping, without storing gradients: Goodfellow, *Efficient per-example "
            "gradient computations*, 2015",
            "Importance sampling: Katharopoulos and Fleuret, *Not all samples are "
            "created equal*, 2018",
        ],
        "norms = sum(p.batch_l2 for p in model.parameters()).sqrt()\n"
        "expected = torch.cat([p.grad_batch.flatten(1) for p in model.parameters()], "
        "1)\nassert torch.allclose(norms, expected.norm(dim=1))",
        ["BatchGrad"],
    ),
    Quantity(
        "Second moment: SumGradSquared",
        ["SumGradSquared"],
        ["sum_grad_squared"],
        ["[*p]"],
        "sum of squared individual gradients",
        r"""The squares of individual gradients, summed over samples, entry by entry:

.. math:: \sum_n g_n^2\,.""",
        MEAN.format(factor="1/N²")
        + " N times this sum, for a mean loss, is the mean of the squared gradients.",
        "As much memory as the gradient.",
        [
            "Diagonal of the empirical Fisher, as in elastic weight consolidation "
            "(EWC): Kirkpatrick et al., *Overcoming catastrophic forgetting in neural "
            "networks*, 2017; about its limits: Kunstner et al., *Limitations of the "
            "empirical Fisher approximation*, 2019",
            "When to stop: Mahsereci et al., *Early stopping without a validation "
            "set*, 2017",
        ],
        "for p in model.parameters():\n"
        "    assert torch.allclose(p.sum_grad_squared, p.grad_batch.square().sum(0))",
        ["BatchGrad"],
    ),
    Quantity(
        "Variance of gradients: Variance",
        ["Variance"],
        ["variance"],
        ["[*p]"],
        "variance of individual gradients",
        r"""Variance over the samples of the batch, entry by entry:

.. math:: \frac1N \sum_n g_n^2 - \Bigl(\frac1N \sum_n g_n\Bigr)^2\,.

It is computed from centered gradients, so that it does not cancel.""",
        MEAN.format(factor="1/N²")
        + " N² times this value is the variance of the samples' own gradients.",
        "As much memory as a few gradients.",
        [
            "Noise scale, and the batch size to choose: McCandlish et al., *An "
            "empirical model of large-batch training*, 2018",
            "Batch sizes and line searches: Balles et al., *Coupling adaptive batch "
            "sizes "
            "with learning rates*, 2017; Mahsereci and Hennig, *Probabilistic line "
            "searches for stochastic optimization*, 2015",
        ],
        "for p in model.parameters():\n"
        "    expected = p.grad_batch.var(0, unbiased=False)\n"
        "    assert torch.allclose(p.variance, expected, atol=1e-7)",
        ["BatchGrad"],
    ),
    Quantity(
        "Dot products of gradients: BatchDotGrad",
        ["BatchDotGrad"],
        ["batch_dot"],
        ["[N, N] or [N, Q]"],
        "pairwise dot products of individual gradients",
        r"""For each pair of samples, and each parameter apart:

.. math:: g_i^\top g_j\,.

Sums over parameters give those of the whole gradients.""",
        MEAN.format(factor="1/N²"),
        "N² numbers for each parameter. For linear maps, individual gradients are not "
        "formed.",
        [
            "Whether samples help each other: Fort et al., *Stiffness*, 2019",
            "Influence of training samples: Pruthi et al., *Estimating training data "
            "influence by tracing gradient descent*, 2020",
        ],
        "for p in model.parameters():\n"
        "    g = p.grad_batch.flatten(1)\n"
        "    assert torch.allclose(p.batch_dot, g @ g.T, atol=1e-6)",
        ["BatchGrad"],
    ),
    Quantity(
        "Gradients for other batches: BatchFactors",
        ["BatchFactors"],
        ["grad_factors"],
        ["object"],
        "individual gradients, saved as factors",
        r"""The individual gradients of a batch, for dot products with those of others.
The gradient of a linear map for one sample is a sum over positions,

.. math:: g_n = \sum_t b_{n,t} \otimes a_{n,t}\,,

and what is saved are its factors, or the gradient itself where it has fewer numbers.
``precondition(p.kfac, damping)`` multiplies it with the inverse of a curvature matrix,
and ``BatchDotGrad(other=...)`` compares it with the gradients of any batch, see
:doc:`../quantities`.""",
        MEAN.format(factor="c = 1/N"),
        "A copy of the factors: for a linear layer of I inputs and O outputs I + O "
        "numbers for each sample and position.",
        [
            "Influence functions: Koh and Liang, *Understanding black-box predictions "
            "via influence functions*, 2017; with EKFAC: Grosse et al., *Studying "
            "large language model generalization with influence functions*, 2023",
        ],
        "queries = {p: p.grad_factors for p in model.parameters()}\n"
        "with backpack(BatchDotGrad(other=queries)):\n"
        "    lossfunc(model(X[:5]), y[:5]).backward()\n"
        "for p in model.parameters():\n"
        "    assert p.batch_dot.shape == (5, 8)\n"
        "    assert torch.allclose(p.grad_factors.individual(), p.grad_batch)",
        ["BatchGrad", "BatchDotGrad"],
    ),
    Quantity(
        "Projected gradients: BatchProjectGrad",
        ["BatchProjectGrad"],
        ["grad_projected"],
        ["[N, k_out, k_in]"],
        "individual gradients, projected from both sides",
        r"""A weight's gradient is a matrix :math:`G_n`, with the weight's first axis as
rows and all others as columns:

.. math:: P_\text{out} G_n P_\text{in}^\top\,.

Biases, and other parameters with a single axis, are projected from one side,
:math:`P g_n`. Projections are random, or given for each parameter.""",
        MEAN.format(factor="c = 1/N"),
        "k² numbers for each sample and weight. For linear maps, convolutions and "
        "embeddings, individual gradients are not formed.",
        [
            "LoGra: Choe et al., *What is your data worth to GPT?*, 2024",
        ],
        "weight = next(model.parameters())\n"
        "assert weight.grad_projected.shape == (8, 16, 16)\n"
        "project = BatchProjectGrad(2)\n"
        "with backpack(project):\n"
        "    lossfunc(model(X), y).backward()\n"
        "P_out, P_in = project.matrices(weight)\n"
        "expected = P_out @ weight.grad_batch @ P_in.T\n"
        "assert torch.allclose(weight.grad_projected, expected, atol=1e-6)",
        ["BatchGrad"],
    ),
    Quantity(
        "Weighted and clipped sums: WeightedGrad, ClippedGrad",
        ["WeightedGrad", "ClippedGrad"],
        ["grad_weighted", "grad_clipped"],
        ["[*p]", "[*p]"],
        "weighted sum of individual gradients, by their norms or dot products",
        r"""A sum of individual gradients :math:`g_n`, with weights that are given, or
follow from norms over all parameters, or from all dot products; clipping is the case
:math:`w_n = \min(1, C / \lVert g_n \rVert)`:

.. math:: \sum_n w_n g_n\,.

Norms are known when every layer has had its turn; the sums are formed then, from
factors, in the same backward pass. ``norms`` and ``weights`` of the extension are there
after it.""",
        'With ``scale="summand"``, :math:`g_n` are the summands of the gradient, which '
        'carry 1/N for a mean loss; with ``scale="sample"``, the gradients of the '
        "samples' own losses.",
        "As much memory as the gradient, and the inputs and cotangents of all layers "
        "until the pass ends. With ``replace_grad=True``, the gradient itself is not "
        "formed.",
        [
            "Clipping for differential privacy: Abadi et al., *Deep learning with "
            "differential privacy*, 2016; in one pass: Bu et al., *Differentially "
            "private optimization on large model at small cost*, 2023",
            "Weights from dot products: Quinton and Rey, *Jacobian descent for "
            "multi-objective optimization*, 2024",
        ],
        "gradients = [p.grad_batch for p in model.parameters()]\n"
        "norms = torch.cat([g.flatten(1) for g in gradients], 1).norm(dim=1)\n"
        "weights = (0.1 / norms).clamp(max=1)\n"
        "for p in model.parameters():\n"
        "    clipped = torch.einsum('n,n...->...', weights, p.grad_batch)\n"
        "    assert torch.allclose(p.grad_clipped, clipped, atol=1e-6)\n"
        "    assert torch.allclose(p.grad_weighted, p.grad, atol=1e-6)",
        ["BatchGrad"],
        {"WeightedGrad": "torch.ones(8)", "ClippedGrad": "0.1"},
    ),
    Quantity(
        "Diagonal of the GGN: DiagGGNExact, DiagGGNMC",
        ["DiagGGNExact", "DiagGGNMC"],
        ["diag_ggn_exact", "diag_ggn_mc"],
        ["[*p]", "[*p]"],
        "diagonal of the generalized Gauss-Newton matrix",
        ROOT + r"""Its diagonal is

.. math:: \operatorname{diag}(G) = \sum_n \sum_v (J_n^\top s_{n,v})^2\,, \qquad
   H_n = \sum_v s_{n,v} s_{n,v}^\top\,.

``DiagGGNExact`` has a column :math:`s_{n,v}` for each output, ``DiagGGNMC`` draws
``mc_samples`` of them; its mean is the exact diagonal.""",
        MEAN.format(factor="1/N"),
        "The exact one pulls back C columns, one for each output: the cost grows "
        "with C. "
        "The sampled one pulls back ``mc_samples``. As much memory as a gradient, "
        "and the columns while they are pulled back.",
        [
            "Scaled steps, as in Dangel, Kunstner and Hennig, *BackPACK: Packing "
            "more into backprop*, 2020",
            "Pruning: LeCun et al., *Optimal brain damage*, 1990",
            "Laplace approximation: MacKay, *A practical Bayesian framework for "
            "backpropagation networks*, 1992",
        ],
        "for p in model.parameters():\n"
        "    root = p.sqrt_ggn_exact  # [C, N, *p]\n"
        "    assert torch.allclose(p.diag_ggn_exact, root.square().sum((0, 1)))\n"
        "    assert p.diag_ggn_mc.shape == p.shape and (p.diag_ggn_mc >= 0).all()",
        ["SqrtGGNExact"],
    ),
    Quantity(
        "Diagonal of each sample's GGN: BatchDiagGGNExact, BatchDiagGGNMC",
        ["BatchDiagGGNExact", "BatchDiagGGNMC"],
        ["diag_ggn_exact_batch", "diag_ggn_mc_batch"],
        ["[N, *p]", "[N, *p]"],
        "the same for each sample",
        ROOT + r"""The diagonal of each summand is

.. math:: \sum_v (J_n^\top s_{n,v})^2\,, \qquad H_n = \sum_v s_{n,v} s_{n,v}^\top\,.""",
        MEAN.format(factor="1/N"),
        "Columns as for the diagonal; N times the memory of the gradient.",
        ["Which samples see curvature where; variance of curvature over samples."],
        "for p in model.parameters():\n"
        "    total = p.diag_ggn_exact_batch.sum(0)\n"
        "    assert torch.allclose(total, p.diag_ggn_exact)",
        ["DiagGGNExact"],
    ),
    Quantity(
        "Root of the GGN: SqrtGGNExact, SqrtGGNMC",
        ["SqrtGGNExact", "SqrtGGNMC"],
        ["sqrt_ggn_exact", "sqrt_ggn_mc"],
        ["[C, N, *p]", "[M, N, *p]"],
        "V with GGN = V Vᵀ",
        ROOT + r"""Its root has the columns

.. math:: V_{v,n} = J_n^\top s_{n,v}\,, \qquad H_n = \sum_v s_{n,v} s_{n,v}^\top\,,
   \qquad G = \sum_{v,n} V_{v,n} V_{v,n}^\top\,.

The small matrix of dot products of the columns has the same nonzero eigenvalues as
:math:`G`, over all parameters at once.""",
        MEAN.format(factor="1/√N"),
        "C · N gradients of memory for the exact one, M · N for the sampled one. "
        "``subsampling`` selects samples.",
        [
            "Eigenvalues and -vectors: Dangel, Tatzel and Hennig, *ViViT: Curvature "
            "access through the generalized Gauss-Newton's low-rank structure*, 2022",
            "Structure of the spectrum: Papyan, *Measurements of three-level "
            "hierarchical "
            "structure in the outliers in the spectrum of deepnet Hessians*, 2019",
        ],
        "for p in model.parameters():\n"
        "    V = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)\n"
        "    diagonal = (V.T @ V).diag().reshape(p.shape)\n"
        "    assert torch.allclose(diagonal, p.diag_ggn_exact)",
        ["DiagGGNExact"],
    ),
    Quantity(
        "Jacobian of the output: BatchJacobian",
        ["BatchJacobian"],
        ["jacobian"],
        ["[C, N, *p]"],
        "Jacobian of the model's output, without a loss",
        r"""The derivative of each feature :math:`c` of the model's output
:math:`f(x_n)`, in the order in which a sample's features are in the output:

.. math:: J_{c,n} = \nabla_p f_c(x_n)\,.

It starts at the output of the extended model. No loss is needed:
``model(X).sum().backward()`` is enough, and ``backpack(..., gradient=False)`` leaves
``.grad`` alone. If there is a loss, it does not matter.""",
        "It knows of no loss, and has no scale.",
        "C columns are pulled back; C · N gradients of memory. ``subsampling`` selects "
        "samples.",
        [
            "Neural tangent kernels (NTK): Jacot et al., *Neural tangent kernel*, 2018",
            "Predictions of linearized networks: Immer et al., *Improving predictions "
            "of Bayesian neural nets via local linearization*, 2021",
        ],
        "p = model[2].bias\n"
        "assert torch.allclose(p.jacobian, torch.eye(3).unsqueeze(1).expand(3, 8, 3))",
    ),
    Quantity(
        "Kronecker factors, sampled: KFAC",
        ["KFAC"],
        ["kfac"],
        ["list of matrices"],
        "Kronecker factors of a GGN block, from Monte-Carlo samples",
        r"""Two small matrices for the weight of a linear layer with inputs :math:`a_n`:

.. math:: G \approx B \otimes A\,, \qquad A = \frac1N \sum_n a_n a_n^\top\,, \qquad
   B = \sum_n \sum_v b_{n,v} b_{n,v}^\top\,,

where :math:`b_{n,v}` are columns, drawn from the network's predictions and pulled back
to the layer's output. Where positions share a weight (convolutions, tokens),
``weight_sharing`` chooses a definition; see :doc:`../quantities`.""",
        "B carries the scale of the loss; A is a mean over samples.",
        "``mc_samples`` columns are pulled back. For a layer of I inputs and O "
        "outputs, I² + O² numbers instead of the block's (I O)².",
        [
            "Martens and Grosse, *Optimizing neural networks with Kronecker-factored "
            "approximate curvature*, 2015; convolutions: Grosse and Martens, 2016",
            "Weight sharing: Eschenhagen et al., *Kronecker-factored approximate "
            "curvature for modern neural network architectures*, 2023",
            "Laplace approximation: Ritter et al., *A scalable Laplace approximation "
            "for neural networks*, 2018",
        ],
        "B, A = model[0].weight.kfac\n"
        "assert B.shape == (5, 5) and torch.allclose(A, X.T @ X / 8, atol=1e-6)",
    ),
    Quantity(
        "Corrected eigenvalues of Kronecker factors: EKFAC",
        ["EKFAC"],
        ["ekfac"],
        ["list of tensors"],
        "eigenvectors of Kronecker factors, corrected eigenvalues",
        r"""Eigenvectors of the factors that :doc:`KFAC <KFAC>` computes, and the
diagonal of the GGN in their basis:

.. math:: G \approx (Q_B \otimes Q_A) \operatorname{diag}(E) (Q_B \otimes Q_A)^\top\,,
   \qquad E = \sum_n \sum_v (Q_B^\top G_{n,v} Q_A)^2\,,

where :math:`G_{n,v}` is a column, pulled back to the weight: no other eigenvalues are
closer to the GGN's block in this basis. Columns are exact, drawn, or (``"empirical"``)
gradients.""",
        "E carries the scale of the loss, eigenvectors have none.",
        "As for Kronecker factors, and eigendecompositions of I³ + O³ operations for a "
        "layer of I inputs and O outputs. Columns that take more memory than "
        "factors are pulled back twice, a few or one at a time. With ``basis``, there "
        "are no decompositions, and once is enough.",
        [
            "George et al., *Fast approximate natural gradient descent in a "
            "Kronecker-factored eigenbasis*, 2018",
            "Influence functions: Grosse et al., *Studying large language model "
            "generalization with influence functions*, 2023",
        ],
        "from backpack.utils.kroneckers import ekfac_mat_prod\n\n"
        "Q_B, Q_A, E = model[0].weight.ekfac\n"
        "assert Q_B.shape == (5, 5) and Q_A.shape == (4, 4) and E.shape == (5, 4)\n"
        "natural_gradient = ekfac_mat_prod([Q_B, Q_A, E], power=-1, damping=1e-2)\n"
        "step = natural_gradient(model[0].weight.grad.flatten())\n"
        "assert step.shape == (20,)",
    ),
    Quantity(
        "Kronecker factors, exact: KFLR",
        ["KFLR"],
        ["kflr"],
        ["list of matrices"],
        "the same, from all columns",
        r"""As for :doc:`KFAC <KFAC>`, but with all C columns instead of drawn ones:

.. math:: G \approx B \otimes A\,, \qquad A = \frac1N \sum_n a_n a_n^\top\,, \qquad
   B = \sum_n \sum_{v=1}^C b_{n,v} b_{n,v}^\top\,.""",
        "B carries the scale of the loss; A is a mean over samples.",
        "C columns are pulled back: right for few outputs. Memory as for KFAC.",
        ["Botev et al., *Practical Gauss-Newton optimisation for deep learning*, 2017"],
        "from backpack.utils.kroneckers import kfacs_to_mat\n\n"
        "bias = model[2].bias  # here, the factor is exact\n"
        "block = kfacs_to_mat(bias.kflr)\n"
        "assert torch.allclose(block.diag(), bias.diag_ggn_exact)",
        ["DiagGGNExact"],
    ),
    Quantity(
        "Kronecker factors, recursive: KFRA",
        ["KFRA"],
        ["kfra"],
        ["list of matrices"],
        "the same, from averages that go from layer to layer",
        r"""As for :doc:`KFLR <KFLR>`, but what is propagated is averaged over the
batch at each layer:

.. math:: B_{l-1} = \frac1N \sum_n J_{n,l}^\top \, B_l \, J_{n,l}\,.

It goes from module to module, and wants a chain of them, or the
:doc:`converter <../converter>`.""",
        "B carries the scale of the loss; A is a mean over samples.",
        "A dense matrix over all features of each layer: good for narrow layers and "
        "many outputs, too large for large convolutional networks.",
        ["Botev et al., *Practical Gauss-Newton optimisation for deep learning*, 2017"],
        "last, exact = model[2].weight.kfra, model[2].weight.kflr\n"
        "assert all(torch.allclose(a, b) for a, b in zip(last, exact))",
        ["KFLR"],
    ),
    Quantity(
        "Diagonal of the Hessian: DiagHessian",
        ["DiagHessian"],
        ["diag_h"],
        ["[*p]"],
        "diagonal of the Hessian",
        r"""Second derivatives with respect to each entry:

.. math:: \frac{\partial^2 \mathcal L}{\partial p_i^2}\,.

It goes from module to module, and wants a chain of them, or the
:doc:`converter <../converter>`.""",
        MEAN.format(factor="1/N"),
        "Columns for the loss, and more for each layer that is curved itself (sigmoid, "
        "tanh; none for ReLU): expensive for wide layers.",
        [
            "Pruning: LeCun et al., *Optimal brain damage*, 1990",
            "As the exact value of what is estimated in Yao et al., *AdaHessian*, 2021",
        ],
        "bias = model[2].bias\n"
        "block = bias.hmp(torch.eye(3))  # the last layer: the diagonal by products\n"
        "assert torch.allclose(block.diag(), bias.diag_h, atol=1e-6)",
        ["HMP"],
    ),
    Quantity(
        "Diagonal of each sample's Hessian: BatchDiagHessian",
        ["BatchDiagHessian"],
        ["diag_h_batch"],
        ["[N, *p]"],
        "the same for each sample",
        r"""For each summand of the loss:

.. math:: c\, \frac{\partial^2 \ell_n}{\partial p_i^2}\,.""",
        MEAN.format(factor="1/N"),
        "As for the diagonal, and N times the memory of the gradient.",
        ["Which samples see negative curvature."],
        "for p in model.parameters():\n"
        "    assert torch.allclose(p.diag_h_batch.sum(0), p.diag_h, atol=1e-6)",
        ["DiagHessian"],
    ),
    Quantity(
        "Products with the Hessian: HMP",
        ["HMP"],
        ["hmp"],
        ["function"],
        "product with the block of the Hessian",
        r"""A function that maps ``[K, *p]`` to ``[K, *p]``, each of K vectors to

.. math:: \frac{\partial^2 \mathcal L}{\partial p^2}\, v\,.""",
        MEAN.format(factor="1/N"),
        "About two gradients for each vector; vectors share passes. The graph is "
        "kept as long as the function.",
        [
            "Pearlmutter, *Fast exact multiplication by the Hessian*, 1994",
            "Hessian-free optimization: Martens, *Deep learning via Hessian-free "
            "optimization*, 2010",
        ],
        "bias = model[2].bias\n"
        "block = bias.hmp(torch.eye(3))\n"
        "assert torch.allclose(block, block.T, atol=1e-6)",
    ),
    Quantity(
        "Products with the GGN: GGNMP",
        ["GGNMP"],
        ["ggnmp"],
        ["function"],
        "product with the block of the GGN",
        ROOT
        + r"""The field is a function that maps ``[K, *p]`` to ``[K, *p]``, each of K
vectors to :math:`G v`.""",
        MEAN.format(factor="1/N"),
        "About two gradients for each vector; vectors share passes. The graph is "
        "kept as long as the function.",
        [
            "Schraudolph, *Fast curvature matrix-vector products for second-order "
            "gradient descent*, 2002",
            "Martens, *Deep learning via Hessian-free optimization*, 2010",
        ],
        "bias = model[2].bias\n"
        "block = bias.ggnmp(torch.eye(3))\n"
        "assert torch.allclose(block.diag(), bias.diag_ggn_exact, atol=1e-6)",
        ["DiagGGNExact"],
    ),
    Quantity(
        "Products with the positive-curvature Hessian: PCHMP",
        ["PCHMP"],
        ["pchmp"],
        ["function"],
        "product with the block of the positive-curvature Hessian",
        r"""The Hessian is a sum over the network's operations, of second derivatives
times the gradient at the operation's output, brought to the parameters by Jacobians.
In the positive-curvature Hessian, each of these is changed before it enters: negative
entries (eigenvalues, if it is not diagonal) become zero (``modify="clip"``) or change
sign (``modify="abs"``). The field is a function that maps ``[K, *p]`` to
``[K, *p]``.""",
        MEAN.format(factor="1/N"),
        "About two gradients for each vector; vectors share passes.",
        [
            "Chen et al., *BDA-PCH: Block-diagonal approximation of positive-curvature "
            "Hessian for training neural networks*, 2018"
        ],
        "block = model[0].bias.pchmp(torch.eye(5))\n"
        "assert torch.linalg.eigvalsh(block).min() > -1e-6",
    ),
]


def tables() -> Dict[str, List[List[str]]]:
    """Read the tables that the benchmark recorded.

    Returns:
        Rows of cells for each network, with the header first.
    """
    found: Dict[str, List[List[str]]] = {}
    rows: List[List[str]] = []
    for line in BENCHMARK.read_text().splitlines():
        if line.startswith("## "):
            rows = found[line[3:]] = []
        elif line.startswith(("| quantity", "| `", "| extended")):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return {name: rows for name, rows in found.items() if name.startswith(NETWORKS)}


def compared() -> List[str]:
    """Show what the benchmark recorded for all packages.

    Returns:
        Lines of reStructuredText.
    """
    lines: List[str] = []
    for network, (header, *rows) in tables().items():
        title = [header[0], *(cell.removesuffix(": time") for cell in header[1::2])]
        shown = [
            [cells[0].replace("`", "``")]
            + [
                f"{t}, {m}" if t.strip("–") else t
                for t, m in zip(cells[1::2], cells[2::2])
            ]
            for cells in rows
        ]
        lines += folded(network, list_table(title, shown))
    header, *rows = sums()
    title = "Clipped sums, weights from dot products, Kronecker factors"
    return lines + folded(title, list_table(["quantity", *header[1:]], rows))


def sums() -> List[List[str]]:
    """Read the table of quantities that replace the gradient, or go without it.

    Returns:
        Rows of cells, with the header first.
    """
    section = BENCHMARK.read_text().split("\n## Clipped sums")[1].split("\n## ")[0]
    return [
        [cell.strip().replace("`", "``") for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| ")
    ]


def charts(folder: Path) -> None:
    """Draw what the benchmark recorded.

    Args:
        folder: Where the pictures go.
    """
    sys.path.append(str(BENCHMARK.parent))
    run = import_module("run")  # needs matplotlib, which what tests import does not
    run.plt.rcParams["svg.hashsalt"] = "backpack"
    for name, start in CHARTS.items():
        network = next(title for title in tables() if title.startswith(start))
        header, *rows = tables()[network]
        packages = [cell.removesuffix(": time") for cell in header[1::2]]
        by_name = {cells[0].strip("`"): cells[1::2] for cells in rows}
        times = {
            quantity: [float(x) if x.strip("–") else None for x in by_name[quantity]]
            for quantity in CHARTED
            if quantity in by_name and any(by_name[quantity])
        }
        figure = run.draw(network, times, packages)
        figure.savefig(folder / f"times-{name}.svg", metadata={"Date": None})
        run.plt.close(figure)  # else it would be a picture of the first example


def recorded() -> Dict[str, Dict[str, List[str]]]:
    """Read time and memory of each quantity, relative to a gradient.

    Returns:
        For each network and quantity, time and memory.
    """
    return {
        network: {
            name.strip("`"): cells for name, *cells in rows if cells[0].strip("–")
        }
        for network, (_, *rows) in tables().items()
    }


def cost_table(names: List[str]) -> List[str]:
    """Show what the benchmark recorded.

    Args:
        names: The extensions.

    Returns:
        Lines of reStructuredText.
    """
    header = ["network", "extension", "time", "memory"]
    rows = [
        [network, f"``{name}``", *values[name][:2]]
        for network, values in recorded().items()
        for name in values
        if name.split("-")[0] in names
    ]
    (_, *networks), *others = sums()
    rows += [
        [network, name, *cell.split(", ")]
        for name, *cells in others
        if name.strip("`").split("-")[0] in names
        for network, cell in zip(networks, cells)
    ]
    if not rows:
        return []
    note = (
        "Relative to a forward and a backward pass without any quantity, on one "
        "thread; from ``benchmarks/README.md``, where it says how this was measured."
    )
    if any("-" in name for _, name, *_ in rows):
        note += (
            " ``exact``, ``expand`` and ``dots`` are options, ``only`` is a pass with "
            "``gradient=False``."
        )
    above = [""] + [network for network, *_ in rows]
    shown = [
        ["" if row[0] == before else row[0].replace(" = ", "\u00a0=\u00a0"), *row[1:]]
        for row, before in zip(rows, above)
    ]
    return [*list_table(header, shown), note, ""]


def code(quantity: Quantity) -> str:
    """Write the example of a page.

    Args:
        quantity: The page's content.

    Returns:
        Python code.
    """
    names = [*quantity.names, *quantity.also]
    given = quantity.arguments
    calls = ", ".join(f"{name}({given.get(name, '')})" for name in names)
    setup = SETUP.format(names=", ".join(names), calls=calls)
    return f"{setup}\n{quantity.example}".strip()


def page(quantity: Quantity) -> str:
    """Write a page.

    Args:
        quantity: Its content.

    Returns:
        reStructuredText.
    """
    lines = [quantity.title, "=" * len(quantity.title), ""]
    for name, field, shape in zip(quantity.names, quantity.fields, quantity.shapes):
        lines += [f"- ``{name}``: saved in ``{field}``, ``{shape}``"]
    lines += ["", quantity.definition.strip(), "", quantity.scale, ""]
    lines += ["Example", "-------", "", ".. testcode::", ""]
    lines += [f"   {line}".rstrip() for line in code(quantity).splitlines()]
    lines += ["", "Cost", "----", "", quantity.cost, "", *cost_table(quantity.names)]
    lines += ["What for", "--------", "", *(f"- {use}" for use in quantity.uses), ""]
    objects = " ".join(f"backpack.extensions.{name}" for name in quantity.names)
    lines += [f".. minigallery:: {objects}", ""]
    lines += ["Options", "-------", ""]
    for name in quantity.names:
        lines += [f".. autoclass:: backpack.extensions.{name}", "   :no-members:"]
        lines += ["   :no-show-inheritance:", ""]
    return "\n".join(lines)


def table(to_pages: str) -> str:
    """Write the overview.

    Args:
        to_pages: Path to the pages.

    Returns:
        reStructuredText.
    """
    rows = []
    for quantity in QUANTITIES:
        link = f":doc:`{', '.join(quantity.names)} <{to_pages}{quantity.names[0]}>`"
        both = zip(quantity.fields, quantity.shapes)
        fields = ", ".join(f"``{f}`` ``{s}``" for f, s in both)
        rows.append([link, fields, quantity.short])
    header = ["extension", "field", "what it is"]
    return "\n".join(list_table(header, rows, "support overview"))


def write(folder: Path) -> None:
    """Write all pages, and the overview.

    Args:
        folder: Where the pages go.
    """
    folder.mkdir(exist_ok=True)
    for quantity in QUANTITIES:
        put(folder / f"{quantity.names[0]}.rst", page(quantity))
    pages = [f"   quantities/{quantity.names[0]}" for quantity in QUANTITIES]
    toctree = [".. toctree::", "   :hidden:", "", *pages, ""]
    put(folder / "overview.inc", "\n".join([table("quantities/"), *toctree]))
    put(folder / "compared.inc", "\n".join(compared()))
    put(folder / "overview-api.inc", table("../quantities/"))
    put(folder / "memory.inc", "\n".join(cost_table(LARGE_AND_SMALL)))


def put(path: Path, text: str) -> None:
    """Write a file, unless it is there: what has not changed is not built again.

    Args:
        path: The file.
        text: Its content.
    """
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
