"""Settings of the server on Binder: Voilà pages look and behave as under `cbviz explore`, and kernels without
a page go.
"""

from typing import Any

from cbviz.app.serve import TEMPLATE, configure_voila


def without_mathjax(page_config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As Voilà alone has it: no page of ours loads anything from another host."""
    page_config["fullMathjaxUrl"] = page_config["mathjaxConfig"] = None
    return page_config


configure_voila(c)  # type: ignore[name-defined]  # noqa: F821  # the server puts `c` into this file
c.MappingKernelManager.cull_idle_timeout = 600  # type: ignore[name-defined]  # noqa: F821  # notebooks are closed and opened again in Lab
c.VoilaConfiguration.template = TEMPLATE  # type: ignore[name-defined]  # noqa: F821
c.VoilaConfiguration.show_tracebacks = True  # type: ignore[name-defined]  # noqa: F821
c.VoilaConfiguration.page_config_hook = without_mathjax  # type: ignore[name-defined]  # noqa: F821
