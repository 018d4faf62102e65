"""`undrift list`: nothing that has a name is missing, and of each name everything is said."""

import pytest
from running import refused

from undrift.errors import BadInput
from undrift.listing import KINDS, listing

NAMES = [(kind, name) for kind, registry in KINDS.items() for name in registry.names()]


def test_every_name_is_listed_with_a_line_that_says_something():
    everything = listing()
    for kind, name in NAMES:
        [line] = [line for line in listing(kind) if line.split()[0] == name]
        assert len(line.split()) > 1, f"{kind} {name} has no description"
        assert f"  {line}" in everything


@pytest.mark.parametrize("kind, name", NAMES)
def test_of_a_name_all_settings(kind, name):
    lines = listing(kind, name)
    assert lines[0] == f"{name} ({KINDS[kind].kind})"
    assert "  settings:" in lines or "  no settings" in lines
    assert not any(" = <" in line or "inner" in line.split() for line in lines)
    assert "\n".join(lines) in "\n".join(listing(name))


def test_settings_have_types_and_defaults():
    lines = [" ".join(line.split()) for line in listing("algorithms", "fedacg")]
    assert "lam = 0.85 a number of at least 0 and of at most 1" in lines
    assert "beta = 0.01 a number of at least 0" in lines
    assert "beta = 0.9 a number of at least 0" in [" ".join(x.split()) for x in listing("parts", "hbm")]
    assert "clients a whole number (must be set)" in [" ".join(x.split()) for x in listing("partitions", "iid")]


def test_an_algorithm_shows_its_stack_innermost_first_with_the_updates():
    text = "\n".join(listing("scaffold"))
    assert text.index("x+ = x + server_lr") < text.index("ControlVariates (option = 2)") < text.index("g - c_i + c")


def test_a_slip_is_answered_with_the_nearest(undrift):
    refused(undrift("list", "algorithms", "scafold"), "did you mean scaffold")
    refused(undrift("list", "algoritms"), "did you mean algorithms")
    refused(undrift("list", "modles", "mlp"), "did you mean models")
    with pytest.raises(BadInput, match="did you mean lenet"):
        listing("lent")
    code, out, err = undrift("list", "models")
    assert (code, err) == (0, "") and out.count("\n") == len(KINDS["models"].names())
