"""Sums of a residual and a product of FP8, added where the product is stored.

`join_residuals` sets a pass of Inductor. It finds these sums in the graphs of compiled layers:
decoder layers of transformers add the output of a projection to what came in.
"""

from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from peagle.kernels.linear import fp8_linear

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


class ResidualPass(CustomGraphPass):
    """Gives products of `peagle::fp8_product` the residual that is added to their result alone."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
                continue
            for residual, term in (node.args, node.args[::-1]):
                if isinstance(residual, Node) and _joins(graph, node, residual, term):
                    break

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, fp8_linear.__file__))


def join_residuals() -> None:
    """Let Inductor join the sums from now on, unless the user has set a pass of this kind."""
    if config.post_grad_custom_post_pass is None:
        config.post_grad_custom_post_pass = ResidualPass()


def _joins(graph: Graph, added: Node, residual: Node, term: Any) -> bool:
    """Put a product with the residual in place of a sum, if a term of it is a product."""
    views, whole = list[Node](), term
    while isinstance(term, Node) and term.target in _VIEWS and len(term.users) == 1:
        views.append(term)
        term = term.args[0]
    product = torch.ops.peagle.fp8_product.default
    if not isinstance(term, Node) or term.target is not product or len(term.users) != 1:
        return False
    first, *others = (node.meta["val"] for node in (residual, added, whole))
    is_alike = all((x.dtype, x.shape) == (first.dtype, first.shape) for x in others)
    *given, before = term.args
    if not is_alike or before is not None or residual is whole:
        return False
    with graph.inserting_before(added):
        result = graph.call_function(product, (*given, residual))
        result.meta = dict(term.meta)
        for view in reversed(views):
            target: Any = view.target
            shaped = graph.call_function(target, (result, *view.args[1:]))
            shaped.meta = dict(view.meta)
            result = shaped
    added.replace_all_uses_with(result)
    for node in (added, *views, term):
        graph.erase_node(node)
    return True
