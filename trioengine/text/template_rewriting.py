"""Rewrites the syntax tree of a chat template before it is compiled, so that a rendering charges everything it does.

Each item of a loop, and each call of a macro, charges the number of nodes that its body evaluates at most. An operation
that Jinja would compile to bare Python (comparisons, `~`, slices, keys) becomes a filter, which gets the rendering's
context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from trioengine.text import template_operations as operations
from trioengine.text.template_operations import BYTES_PER_STEP, Budget, text_bytes, within_budget

MAX_NESTING = 100  # nodes of the syntax tree within nodes
# these names cannot be written in a template
_CHARGE, _TURNS, _COMPARE, _CONCAT, _SLICE, _KEY = (
    f"({name})" for name in ("charge", "turns", "compare", "concat", "slice", "key")
)
_REFUSED: dict[type[nodes.Node], str] = {
    nodes.Block: "block",
    nodes.Extends: "extends",
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from",
    nodes.ScopedEvalContextModifier: "autoescape",
}


class TemplateRefused(Exception):
    """The template is too large, or has a statement that chat templates may not have."""


def rewrite(template: nodes.Template) -> nodes.Template:
    """Return the template with charges, for an environment with INTERNAL_FILTERS. Raises TemplateRefused."""
    _check(template)
    result: nodes.Template = _Rewriter().visit(template)
    return result


def _check(node: nodes.Node, depth: int = 0) -> None:
    if depth > MAX_NESTING:
        raise TemplateRefused("it is nested too deeply")
    refused = _REFUSED.get(type(node))
    if refused is not None:
        raise TemplateRefused(f"it has a {{% {refused} %}}")
    if isinstance(node, nodes.For) and node.recursive:
        raise TemplateRefused("it has a recursive loop")
    for child in node.iter_child_nodes():
        _check(child, depth + 1)


def _steps(parts: Iterable[nodes.Node]) -> int:
    """Return the most steps that these nodes take, without the bodies of loops and macros: these charge themselves."""
    return sum(map(_steps_of, parts))


def _steps_of(node: nodes.Node) -> int:
    match node:
        case nodes.TemplateData():
            return 1 + text_bytes(node.data) // BYTES_PER_STEP
        case nodes.For():
            return 1 + _steps([node.target, node.iter, *node.else_])
        case nodes.Macro():
            return 1 + _steps(node.defaults)
        case nodes.CallBlock():
            return 1 + _steps([node.call, *node.defaults])
        case nodes.If():
            tests = [branch.test for branch in (node, *node.elif_)]
            bodies = [branch.body for branch in (node, *node.elif_)]
            return 1 + _steps(tests) + max(map(_steps, [*bodies, node.else_]))
    return 1 + _steps(node.iter_child_nodes())


# ---- rules, applied to a node after its children ---------------------------------------------------------


def _charge_body(node: Any) -> nodes.Node:
    charge = _filter(nodes.Const(_steps(node.body)), _CHARGE)
    node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))
    return node  # type: ignore[no-any-return]


def _charge_loop(node: nodes.For) -> nodes.Node:
    steps = 1 + _steps(node.body) + (0 if node.test is None else _steps_of(node.test))
    node.iter = _filter(node.iter, _TURNS, nodes.Const(steps))
    return node


def _charge_arguments(node: Any) -> nodes.Node:
    for name in ("dyn_args", "dyn_kwargs"):  # *values and **values
        values = getattr(node, name)
        if values is not None:
            setattr(node, name, _filter(values, _TURNS, nodes.Const(1)))
    return node  # type: ignore[no-any-return]


def _compare_within_budget(node: nodes.Compare) -> nodes.Node:
    if _compares_with_constant(node):
        return node
    operands = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
    return _filter(node.expr, _COMPARE, *operands)


def _concatenate_within_budget(node: nodes.Concat) -> nodes.Node:
    return _filter(node.nodes[0], _CONCAT, *node.nodes[1:])


def _slice_within_budget(node: nodes.Getitem) -> nodes.Node:
    if not isinstance(node.arg, nodes.Slice):
        return node
    ends = (node.arg.start, node.arg.stop, node.arg.step)
    return _filter(node.node, _SLICE, *[nodes.Const(None) if end is None else end for end in ends])


def _check_key(node: nodes.Pair) -> nodes.Node:
    if not isinstance(node.key, nodes.Const):
        node.key = _filter(node.key, _KEY)
    return node


_RULES: Mapping[type[nodes.Node], Callable[[Any], nodes.Node]] = {
    nodes.Template: _charge_body,
    nodes.Macro: _charge_body,
    nodes.CallBlock: _charge_body,
    nodes.For: _charge_loop,
    nodes.Call: _charge_arguments,
    nodes.Filter: _charge_arguments,
    nodes.Test: _charge_arguments,
    nodes.Compare: _compare_within_budget,
    nodes.Concat: _concatenate_within_budget,
    nodes.Getitem: _slice_within_budget,
    nodes.Pair: _check_key,
}


class _Rewriter(NodeTransformer):
    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.generic_visit(node)
        rule = _RULES.get(type(node))
        return node if rule is None else rule(node)


def _compares_with_constant(node: nodes.Compare) -> bool:
    """Return whether the comparison takes one step, whatever the other operand is."""
    if len(node.ops) > 1:
        return False
    (operand,) = node.ops
    if operand.op in ("in", "notin"):
        choices = operand.expr
        return isinstance(choices, nodes.List | nodes.Tuple) and all(_is_constant(item) for item in choices.items)
    return _is_constant(node.expr) or _is_constant(operand.expr)


def _is_constant(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const)


def _filter(value: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [*args], [], None, None, lineno=value.lineno)


# ---- the filters --------------------------------------------------------------------------------------------------

INTERNAL_FILTERS: Mapping[str, Callable[..., Any]] = {
    _CHARGE: within_budget(Budget.charge),
    _TURNS: within_budget(Budget.turns),
    _COMPARE: within_budget(operations.compared),
    _CONCAT: within_budget(operations.concatenated),
    _SLICE: within_budget(operations.sliced),
    _KEY: operations.checked_key,
}
