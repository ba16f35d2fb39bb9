"""A backbone of one's own: two blocks, of which the second adapts."""

import torch.nn.functional as F
from torch import nn

import npbml


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), npbml.Norm(outputs)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


@npbml.register_backbone("tiny", blocks=2, smallest=4)
def tiny(channels):
    """two small blocks"""
    return [Block(channels, 6), Block(6, 6)]
