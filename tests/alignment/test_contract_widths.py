"""Reading widths from source text: what is decided, and that nothing is said where the text does not decide."""

from __future__ import annotations

import ast
import textwrap

import pytest

from porter.alignment.contract_lint.widths import Site, Width, sites_of

STORED = {"weight": Width.GIVEN, "wide": Width.WIDE}


def sites(body: str, kind: str, arguments: str = "self, x, y") -> list[Site]:
    tree = ast.parse(f"def forward({arguments}):\n{textwrap.indent(textwrap.dedent(body), '    ')}")
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    return [site for site in sites_of(function, STORED) if site.kind == kind]


@pytest.mark.parametrize(
    ("expression", "width"),
    [
        ("x", Width.GIVEN),
        ("x.float()", Width.WIDE),
        ("x.to(torch.float32)", Width.WIDE),
        ("x.to(dtype=torch.float64)", Width.WIDE),
        ("x.type(torch.float32)", Width.WIDE),
        ("x.to('cpu')", None),
        ("x.to(device)", None),
        ("x.float().to(x.dtype)", Width.GIVEN),
        ("x.float().type_as(y)", Width.GIVEN),
        ("x.half()", Width.NARROW),
        ("x.to(torch.bfloat16)", Width.NARROW),
        ("x * 2 + 1", Width.GIVEN),
        ("x.float() * y", Width.WIDE),
        ("x.half() * y", Width.GIVEN),
        ("self.weight * x", Width.GIVEN),
        ("self.wide * x", Width.WIDE),
        ("self.projection(x)", None),
        ("self.projection.weight", None),
        ("helper(x)", None),
        ("helper(x) * x.float()", Width.WIDE),
        ("torch.rsqrt(x.float())", Width.WIDE),
        ("torch.softmax(x, -1, dtype=torch.float32)", Width.WIDE),
        ("F.silu(x)", Width.GIVEN),
        ("torch.zeros(3)", None),
        ("x.float()[0].T.view(3, -1)", Width.WIDE),
        ("x if flag else x.float()", None),
        ("-x.float()", Width.WIDE),
        ("cache.update(x, y)", None),
        ("(x.float(), y)", Width.WIDE),
    ],
)
def test_width_of_an_expression(expression: str, width: Width | None) -> None:
    (site,) = sites(f"return {expression}", "return")
    assert site.width == width


def test_casts_are_followed_through_assignments_and_names_of_dtypes() -> None:
    body = """
        given = x.dtype
        x = x.to(torch.float32)
        first, second = x.chunk(2)
        return (first * second).to(given)
    """
    assert [site.width for site in sites(body, "return")] == [Width.GIVEN]
    body = """
        x = x.float()
        given = x.dtype
        return y.to(given)
    """
    assert [site.width for site in sites(body, "return")] == [Width.WIDE]


def test_an_operation_in_place_keeps_its_dtype() -> None:
    body = """
        x += y.float()
        return x
    """
    assert [site.width for site in sites(body, "return")] == [Width.GIVEN]


def test_what_only_one_branch_casts_is_unknown() -> None:
    body = """
        if self.training:
            x = x.float()
        return x
    """
    assert [site.width for site in sites(body, "return")] == [None]
    body = """
        if self.training:
            x = x.float()
        else:
            x = x.double()
        return x
    """
    assert [site.width for site in sites(body, "return")] == [Width.WIDE]


@pytest.mark.parametrize(
    ("expression", "width"),
    [
        ("x.pow(2).mean(-1)", Width.GIVEN),
        ("x.float().pow(2).mean(-1, keepdim=True)", Width.WIDE),
        ("torch.mean(x * x, -1)", Width.GIVEN),
        ("(x ** 2).mean(-1, dtype=torch.float32)", Width.WIDE),
        ("torch.sum(x.square(), -1)", Width.GIVEN),
        ("x.var(-1)", Width.GIVEN),
    ],
)
def test_means_of_squares(expression: str, width: Width) -> None:
    assert [site.width for site in sites(f"variance = {expression}", "mean-square")] == [width]


def test_squares_are_followed_through_a_name_and_other_means_are_none() -> None:
    assert [s.width for s in sites("s = x * x\nm = s.mean(-1)", "mean-square")] == [Width.GIVEN]
    assert sites("m = x.mean(-1)\nn = (x * y).sum()", "mean-square") == []


@pytest.mark.parametrize(
    ("expression", "width"),
    [
        ("x.softmax(-1)", Width.GIVEN),
        ("torch.softmax(x.float(), -1)", Width.WIDE),
        ("nn.functional.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)", Width.WIDE),
        ("torch.nn.functional.softmax(x, dim=-1)", Width.GIVEN),
        ("F.softmax(helper(x), -1)", None),
    ],
)
def test_softmax(expression: str, width: Width | None) -> None:
    assert [site.width for site in sites(f"p = {expression}", "softmax")] == [width]


@pytest.mark.parametrize(
    ("expression", "width"),
    [
        ("F.linear(x, self.weight)", Width.GIVEN),
        ("F.linear(x.float(), self.weight.float())", Width.WIDE),
        ("F.linear(x.type(torch.float32), self.weight.type(torch.float32))", Width.WIDE),
        ("x @ y.T", Width.GIVEN),
        ("torch.matmul(x.float(), y)", Width.WIDE),
        ("x.matmul(self.wide)", Width.WIDE),
    ],
)
def test_products(expression: str, width: Width) -> None:
    assert [site.width for site in sites(f"z = {expression}", "linear")] == [width]


def test_casts_to_sixteen_bits_say_what_is_cast() -> None:
    body = """
        state = (x.float() * y).to(torch.float16)
        x = x.bfloat16()
        y.float().half()
    """
    assert [(s.target, s.width) for s in sites(body, "cast")] == [
        ("state", Width.WIDE),
        ("x", Width.GIVEN),
        ("y.float()", Width.WIDE),
    ]


def test_loops_and_contexts_are_read() -> None:
    body = """
        with torch.no_grad():
            for step in range(3):
                p = x.softmax(-1)
        return x
    """
    assert len(sites(body, "softmax")) == 1
