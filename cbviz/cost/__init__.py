"""Cost models: what a step's work is and how long it would take.

`make` picks one by the name that `EngineConfig.cost` holds.
"""

from __future__ import annotations

from cbviz.config import ConfigError
from cbviz.cost.article import ArticleCost, ArticleSharedCost
from cbviz.cost.base import CostModel
from cbviz.cost.roofline import Roofline
from cbviz.specs import DeviceSpec, ModelSpec

COSTS = ("roofline", "article", "article-shared")


def make(name: str, spec: ModelSpec, device: DeviceSpec) -> CostModel:
    """The cost model called `name`; the article's ones ignore `spec` and `device`.

    Raises ConfigError for an unknown name.
    """
    if name == "roofline":
        return Roofline(spec, device)
    if name == "article":
        return ArticleCost()
    if name == "article-shared":
        return ArticleSharedCost()
    raise ConfigError(f"cost is {name!r}, it must be one of {', '.join(COSTS)}")


__all__ = ["COSTS", "CostModel", "make"]
