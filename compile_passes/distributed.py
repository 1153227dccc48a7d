"""Layers in graphs that Dynamo's DDP optimiser has split.

Under `DistributedDataParallel` (DDP), Dynamo splits a graph wherever the parameters read so far fill a bucket of
gradients, and compiles each part separately, so that a bucket is sent while the backward pass of earlier parts runs. A
split can come before any node that reads a parameter, even inside a layer. Then a part has a gate without its value, or
a layer whose mask comes from another part as a plain tensor. The report says that the graph was split.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch._guards import TracingContext
from torch.fx import Node

from .recognise import Recogniser
from .report import SPLIT_BY_DDP, SiteReport, missed_at
from .shapes import sources
from .sites import Site
from .values import Product, Weighted, first_of


def is_part_of_a_split_graph() -> bool:
    """Whether the graph that is being compiled is one part of a graph that Dynamo's DDP optimiser split."""
    return getattr(TracingContext.try_get(), "ddp_optimizer_ctx", None) is not None


def lacks_its_mask(site: Site) -> bool:
    """Whether another part makes a mask of a layer, so that this graph cannot prove that it is a mask."""
    masks: list[Any] = [one.factor.mask.bits for one in site.projections if one.factor is not None]
    products = [one.weight for one in site.projections if isinstance(one.weight, Product)]
    masks += [factor for product in products for factor in (product.a, product.b)]
    return is_part_of_a_split_graph() and any(map(_comes_from_another_part, set().union(*map(sources, masks))))


def _comes_from_another_part(node: Node) -> bool:
    return node.op == "placeholder" and getattr(node, "_dynamo_source", node) is None


def split_layers(recogniser: Recogniser, found: Collection[Node]) -> list[SiteReport]:
    """A miss for each masked weight that belongs to no layer of this part; `found` are the nodes of its layers."""
    misses: dict[Any, SiteReport] = {}
    for node in recogniser.view.graph.nodes:
        value = first_of(recogniser.value(node))
        if isinstance(value, Weighted) and value.factor is not None and node not in found:
            misses.setdefault(recogniser.key(value.weight), missed_at(node, SPLIT_BY_DDP))
    return list(misses.values())
