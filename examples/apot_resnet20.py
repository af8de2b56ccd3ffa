"""ResNet-20 of the APoT paper: a checkpoint of the authors, scored as they trained it and packed.

    python examples/apot_resnet20.py res20_4bit/model_best.pth.tar --bits 4 --data cifar-10-batches-py

Checkpoints of 2, 3, 4 and 32 bits are in github.com/yhhhli/APoT_Quantization (CIFAR10/result), the images at
cs.toronto.edu/~kriz/cifar.html ("python version"). Without --data, random images go through the model.
"""

import argparse
import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.compat.apot.paper import import_checkpoint_

MEAN, DEVIATION = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)  # the authors' own


class Block(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(x)).relu())))
        return self.fc(x.mean((2, 3)))


def read_images(folder: str | None, count: int) -> tuple[Tensor, Tensor | None]:
    """Test images of CIFAR-10, normalized, and their classes; random ones where there is no folder."""
    if folder is None:
        return torch.randn(count, 3, 32, 32), None
    batch = pickle.loads((Path(folder) / "test_batch").read_bytes(), encoding="bytes")
    pixels = torch.from_numpy(batch[b"data"][:count]).view(-1, 3, 32, 32).float() / 255
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return (pixels - mean) / deviation, torch.tensor(batch[b"labels"][:count])


@torch.no_grad()
def classes(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(part).argmax(1) for part in images.split(200)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a model_best.pth.tar")
    parser.add_argument("--bits", type=int, required=True, help="what it was trained with: in the name of its folder")
    parser.add_argument("--data", help="the folder cifar-10-batches-py")
    parser.add_argument("--images", type=int, default=10_000)
    options = parser.parse_args()
    model = ResNet20().eval()
    checkpoint = torch.load(options.checkpoint, map_location="cpu", weights_only=True)
    report = import_checkpoint_(model, checkpoint, options.bits)
    print(str(report).splitlines()[len(report.entries) + 1])  # all of it shows every layer
    images, labels = read_images(options.data, options.images)
    trained = classes(model, images)
    nc.convert_(model)
    packed = classes(model, images)
    print(f"the packed model gives the same class on {int((trained == packed).sum())} of {len(images)} images")
    for name, found in (("as trained", trained), ("packed", packed)):
        if labels is not None:
            print(f"{name}: {100 * float((found == labels).float().mean()):.2f}% right")


if __name__ == "__main__":
    main()
