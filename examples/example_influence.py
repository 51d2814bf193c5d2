"""
Which training images influence a prediction?
=============================================

Why does a network think that this is a three? Because of images that it was trained on.
A gradient step for a training image changes the loss of a test image by, to first
order, minus the learning rate times the dot product of their gradients (Pruthi et al.,
2020, "Estimating training data influence by tracing gradient descent").
``BatchDotGrad`` has all of these products from one backward pass, and never forms a
gradient of a linear layer.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn import CrossEntropyLoss, Linear, ReLU, Sequential
from torch.testing import assert_close

from backpack import backpack, extend
from backpack.extensions import BatchDotGrad
from backpack.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
images, labels = load_one_batch_mnist(batch_size=1000, shuffle=False)
train, test = images[:900], images[900:]
y_train, y_test = labels[:900], labels[900:]
model = extend(Sequential(Linear(784, 50), ReLU(), Linear(50, 10)))
lossfunc = extend(CrossEntropyLoss(reduction="sum"))

optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(60):
    batch = torch.randint(900, (100,))
    optimizer.zero_grad()
    lossfunc(model(train[batch].flatten(1)), y_train[batch]).backward()
    optimizer.step()
predictions = model(test.flatten(1)).argmax(1)
print(f"{100 * (predictions == y_test).double().mean():.0f} % of the test images")

# %%
# All dot products at once
# ------------------------
# Training and test images are put into one batch, whose products are summed over
# parameters. The part that belongs to pairs of both is the influence.

X, y = torch.cat([test, train]).flatten(1), torch.cat([y_test, y_train])
with backpack(BatchDotGrad()):
    lossfunc(model(X), y).backward()
dots = sum(p.batch_dot for p in model.parameters())
influence = dots[: len(test), len(test) :]  # [100, 900]
print(f"Influences of training images on test images: {list(influence.shape)}")

# %%
# Who helps, and who hurts
# ------------------------
# Test images with the largest loss come first. Green: their loss falls most, if a step
# is made for these training images. Red: it rises most.

hard = dots.diag()[: len(test)].argsort(descending=True)[:4]
fig, axes = plt.subplots(4, 7, figsize=(8, 5), layout="constrained")
for row, n in zip(axes, hard.tolist()):
    order = influence[n].argsort(descending=True).tolist()
    row[0].imshow(test[n, 0].numpy(), cmap="gray")
    row[0].set_title(f"{y_test[n]}, seen as {predictions[n]}", fontsize=8)
    for ax, m, color in zip(row[1:], order[:3] + order[-3:], "gggrrr"):
        ax.imshow(train[m, 0].numpy(), cmap="gray")
        ax.set_title(f"{y_train[m]}: {influence[n, m]:+.0f}", color=color, fontsize=8)
for ax in axes.flat:
    ax.axis("off")
plt.show()

helpful, harmful = influence.argmax(1), influence.argmin(1)
same = [(y_train[m] == y_test).double().mean() for m in (helpful, harmful)]
print(f"Most helpful: the same digit for {100 * same[0]:.0f} % of the test images;")
print(f"most harmful: for {100 * same[1]:.0f} %.")
assert same[0] > 0.9 and same[1] < 0.1

# %%
# Check
# -----
# Make a tiny step for a training image, and see by how much a test image's loss
# changes.

X, model = X.double(), model.double()
params, lr = list(model.parameters()), 1e-7
for n, m in [(int(hard[0]), int(helpful[hard[0]])), (int(hard[1]), 5)]:
    pair = [n, len(test) + m]
    of_test, of_train = (CrossEntropyLoss()(model(X[[i]]), y[[i]]) for i in pair)
    step = torch.autograd.grad(of_train, params)
    with torch.no_grad():
        for p, g in zip(params, step):
            p.sub_(lr * g)
        change = CrossEntropyLoss()(model(X[[n]]), y[[n]]) - of_test
        for p, g in zip(params, step):
            p.add_(lr * g)
    assert_close(-change / lr, influence[n, m].double(), rtol=1e-2, atol=1e-2)
print("Steps change the loss as the dot products say.")
