"""The networks of Gist's evaluation (Jain et al., ISCA 2018), with a loss, for images [B, 3, H, H] of any fitting size.

Shapes are those of the papers of each network; the layers behind the features take what a smaller image leaves.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Layers = list[nn.Module]


def conv(inside: int, outside: int, kernel: int, stride: int = 1, padding: int = 0) -> Layers:
    """A convolution and its ReLU."""
    return [nn.Conv2d(inside, outside, kernel, stride, padding), nn.ReLU()]


class Classifier(nn.Module):
    """Features, layers behind them, and the cross entropy."""

    def __init__(self, features: nn.Module, hidden: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.features = features
        layers: Layers = []
        for width in hidden:
            layers += [nn.LazyLinear(width), nn.ReLU(), nn.Dropout(0.5)]
        self.behind = nn.Sequential(nn.Flatten(1), *layers, nn.LazyLinear(classes))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean loss of images [B, 3, H, H] of classes [B]."""
        return F.cross_entropy(self.behind(self.features(x)), target)


def alexnet(classes: int) -> nn.Module:
    """AlexNet (Krizhevsky et al., 2012), in one column."""
    pool = lambda: nn.MaxPool2d(3, 2)  # noqa: E731
    features = [*conv(3, 64, 11, 4, 2), pool(), *conv(64, 192, 5, 1, 2), pool(), *conv(192, 384, 3, 1, 1),
                *conv(384, 256, 3, 1, 1), *conv(256, 256, 3, 1, 1), pool()]  # fmt: skip
    return Classifier(nn.Sequential(*features), (4096, 4096), classes)


def overfeat(classes: int) -> nn.Module:
    """OverFeat, the fast model (Sermanet et al., 2013)."""
    features = [*conv(3, 96, 11, 4), nn.MaxPool2d(2), *conv(96, 256, 5), nn.MaxPool2d(2), *conv(256, 512, 3, 1, 1),
                *conv(512, 1024, 3, 1, 1), *conv(1024, 1024, 3, 1, 1), nn.MaxPool2d(2)]  # fmt: skip
    return Classifier(nn.Sequential(*features), (3072, 4096), classes)


def vgg16(classes: int) -> nn.Module:
    """VGG-16 (Simonyan and Zisserman, 2014)."""
    layers: Layers = []
    inside = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += conv(inside, width, 3, 1, 1)
            inside = width
        layers.append(nn.MaxPool2d(2))
    return Classifier(nn.Sequential(*layers), (4096, 4096), classes)


def nin(classes: int) -> nn.Module:
    """Network in network (Lin et al., 2013)."""
    layers: Layers = []
    inside = 3
    for width, kernel, stride, padding in ((96, 11, 4, 0), (256, 5, 1, 2), (384, 3, 1, 1), (1024, 3, 1, 1)):
        layers += [*conv(inside, width, kernel, stride, padding), *conv(width, width, 1), *conv(width, width, 1)]
        layers += [nn.MaxPool2d(3, 2)] if width < 1024 else []
        inside = width
    layers[-2] = nn.Conv2d(1024, classes, 1)
    layers[-4] = nn.Conv2d(1024, 1024, 1)
    return Average(nn.Sequential(*layers))


class Average(nn.Module):
    """Features that are averaged over the image, one for each class."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean loss."""
        return F.cross_entropy(self.features(x).mean((2, 3)), target)


class Inception(nn.Module):
    """A module of four branches."""

    def __init__(self, inside: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, three_in, three, five_in, five, pooled = widths
        self.branches = nn.ModuleList([
            nn.Sequential(*conv(inside, one, 1)),
            nn.Sequential(*conv(inside, three_in, 1), *conv(three_in, three, 3, 1, 1)),
            nn.Sequential(*conv(inside, five_in, 1), *conv(five_in, five, 5, 1, 2)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), *conv(inside, pooled, 1)),
        ])  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The branches side by side."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def inception(classes: int) -> nn.Module:
    """GoogLeNet (Szegedy et al., 2014), without its side losses and local response norms."""
    layers: Layers = [*conv(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1), *conv(64, 64, 1), *conv(64, 192, 3, 1, 1),
                      nn.MaxPool2d(3, 2, 1)]  # fmt: skip
    inside = 192
    for number, widths in enumerate((
        (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
    )):  # fmt: skip
        layers += [nn.MaxPool2d(3, 2, 1)] if number in (2, 7) else []
        layers.append(Inception(inside, widths))
        inside = widths[0] + widths[2] + widths[4] + widths[5]
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Dropout(0.4)), (), classes)


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        norm = nn.BatchNorm2d
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), norm(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), norm(4 * width),
        )  # fmt: skip
        self.across: nn.Module = nn.Identity()
        if stride > 1 or inside != 4 * width:
            self.across = nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False), norm(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways, through a ReLU."""
        return F.relu(self.body(x) + self.across(x), inplace=True)


def resnet50(classes: int) -> nn.Module:
    """ResNet-50 (He et al., 2015)."""
    layers: Layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
                      nn.MaxPool2d(3, 2, 1)]  # fmt: skip
    inside = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(count):
            layers.append(Bottleneck(inside, width, 2 if number == 0 and width > 64 else 1))
            inside = 4 * width
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)), (), classes)


NETWORKS = {  # makes it; side of the images and batch here, on two cores
    "AlexNet": (alexnet, 127, 8),
    "NiN": (nin, 127, 8),
    "Overfeat": (overfeat, 127, 8),
    "VGG-16": (vgg16, 64, 4),
    "Inception": (inception, 96, 8),
    "ResNet-50": (resnet50, 96, 8),
}
