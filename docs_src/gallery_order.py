"""In which order the gallery shows its pages: tasks first, then techniques."""

from pathlib import Path

ORDER = """
kfac_training laplace differential_privacy noise_scale influence pruning ggn_spectrum
transformer distributed compiled_step diag_ggn_optimizer cg_newton
all_in_one first_order_resnet rnn resnet_all_in_one custom_module extension_hook
subsampling batched_jacobians grad_of_variance trace_estimation retain_graph
save_memory_convolutions
demo
""".split()


class ByTask:
    """Sorts file names as listed above; what is not listed is an error."""

    def __init__(self, src_dir: str):
        """Sort files of a folder.

        Args:
            src_dir: The folder.
        """

    def __call__(self, filename: str) -> int:
        """Tell the place of a page.

        Args:
            filename: Name of the script.

        Returns:
            Its position.
        """
        return ORDER.index(Path(filename).stem.replace("example_", ""))
