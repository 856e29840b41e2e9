"""Loops and small arrays that exist only before compilation, so that a kernel's tile lives in registers.

Numba has no unroll hint, and an array that a loop indexes ends up in memory. `unrolled` rewrites a function's source:

    for i in static(4): ...       the body four times, with i a number
    sums = registers(4)           four variables: sums[i] becomes one of them; registers(4, x) sets each to x
    sums = f(sums, x)             alone, the name stands for all four: as arguments, as results, in a return
    def f(sums: 4, x): ...        four parameters
    if i < 2: ...                 decided here where only numbers known here take part

and the names given as keywords become numbers; parameters among them are dropped. The result is an ordinary function.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from typing import Any


def static(*bounds: int) -> range:
    """Bounds of a loop that `unrolled` writes out, as of `range`; also runs as it is."""
    return range(*bounds)


def registers(count: int, value: Any = 0) -> list[Any]:
    """`count` variables that `unrolled` keeps apart; also runs as it is."""
    return [value] * count


class _Unroll(ast.NodeTransformer):
    def __init__(self, known: dict[str, Any]) -> None:
        self.known = known
        self.arrays: dict[str, int] = {}

    def value(self, node: ast.expr) -> Any:
        """The value of an expression over known numbers; NameError where another name takes part."""
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if any(isinstance(n, ast.Call | ast.Attribute | ast.Subscript) for n in ast.walk(node)) or not names <= set(
            self.known
        ):
            raise NameError(ast.unparse(node))
        return eval(compile(ast.Expression(node), "<static>", "eval"), {}, dict(self.known))

    def body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in statements:
            new = self.visit(statement)
            out.extend(new if isinstance(new, list) else [] if new is None else [new])
        return out

    def visit_For(self, node: ast.For) -> Any:
        call = node.iter
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "static"):
            node.iter = self.visit(node.iter)
            node.body = self.body(node.body)
            return node
        assert isinstance(node.target, ast.Name) and not node.orelse
        out: list[ast.stmt] = []
        kept = self.known
        for i in range(*[self.value(argument) for argument in call.args]):
            self.known = {**kept, node.target.id: i}
            out.extend(self.body([_copy(statement) for statement in node.body]))
        self.known = kept
        return out

    def visit_If(self, node: ast.If) -> Any:
        try:
            chosen = bool(self.value(node.test))
        except NameError:
            node.test = self.visit(node.test)
            node.body = self.body(node.body) or [ast.Pass()]
            node.orelse = self.body(node.orelse)
            return node
        return self.body(node.body if chosen else node.orelse)

    def visit_Assign(self, node: ast.Assign) -> Any:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "registers":
            (target,) = node.targets
            assert isinstance(target, ast.Name)
            count = self.value(call.args[0])
            self.arrays[target.id] = count
            if len(call.args) == 1:
                return []
            initial = self.visit(call.args[1])
            names = [ast.Name(f"{target.id}_{i}", ast.Store()) for i in range(count)]
            return [ast.Assign([name], _copy(initial)) for name in names]
        node.value = self.visit(node.value)
        node.targets = [self.target(target) for target in node.targets]
        return node

    def target(self, node: ast.expr) -> ast.expr:
        """A target of an assignment, register arrays in it taken apart."""
        if isinstance(node, ast.Name) and node.id in self.arrays:
            parts = self.parts(node.id, ast.Store())
            return parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Store())
        if isinstance(node, ast.Tuple):
            node.elts = self.flat(node.elts, ast.Store())
            return node
        return self.visit(node)

    def parts(self, name: str, context: ast.expr_context) -> list[ast.expr]:
        return [ast.Name(f"{name}_{i}", context) for i in range(self.arrays[name])]

    def flat(self, nodes: list[ast.expr], context: ast.expr_context) -> list[ast.expr]:
        out: list[ast.expr] = []
        for node in nodes:
            known = isinstance(node, ast.Name) and node.id in self.arrays
            out.extend(self.parts(node.id, context) if known else [self.visit(node)])
        return out

    def visit_Call(self, node: ast.Call) -> Any:
        node.args = self.flat(node.args, ast.Load())
        return node

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        node.elts = self.flat(node.elts, node.ctx)
        return node

    def visit_Return(self, node: ast.Return) -> Any:
        if node.value is not None:
            nodes = self.flat([node.value], ast.Load())
            node.value = nodes[0] if len(nodes) == 1 else ast.Tuple(nodes, ast.Load())
        return node

    def parameters(self, arguments: ast.arguments) -> None:
        out = []
        for argument in arguments.args:
            if argument.arg in self.known:
                continue
            if argument.annotation is None:
                out.append(argument)
            else:
                count = self.arrays[argument.arg] = self.value(argument.annotation)
                out.extend(ast.arg(f"{argument.arg}_{i}") for i in range(count))
        arguments.args = out

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id in self.arrays:
            index = self.value(node.slice)
            if not 0 <= index < self.arrays[node.value.id]:
                raise IndexError(f"{ast.unparse(node)}: index {index} of {self.arrays[node.value.id]} registers")
            return ast.Name(f"{node.value.id}_{index}", node.ctx)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        if isinstance(node.ctx, ast.Load) and node.id in self.known:
            return ast.copy_location(ast.Constant(self.known[node.id]), node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        try:
            return ast.Constant(self.value(node))
        except NameError:
            return self.generic_visit(node)


def _copy(node: Any) -> Any:
    return (
        ast.parse(ast.unparse(node)).body[0]
        if isinstance(node, ast.stmt)
        else ast.parse(ast.unparse(node)).body[0].value
    )


def unrolled(function: Callable[..., Any] | None = None, **known: Any) -> Any:
    """The function with static loops written out and `known` names as numbers; also a decorator. See the module."""
    if function is None:
        return lambda f: unrolled(f, **known)
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    expand = _Unroll(dict(known))
    expand.parameters(definition.args)
    definition.body = expand.body(definition.body)
    text = ast.unparse(ast.fix_missing_locations(tree))
    tag = ", ".join(f"{name}={value}" for name, value in known.items())
    file = f"<unrolled {function.__module__}.{function.__qualname__}({tag})>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space: dict[str, Any] = {}
    exec(compile(text, file, "exec"), function.__globals__, space)
    result = space[function.__name__]
    result.__module__, result.__qualname__, result.__doc__ = (
        function.__module__,
        function.__qualname__,
        function.__doc__,
    )
    return result
