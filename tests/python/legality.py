"""Which inputs the rows of protocol_rows.py allow: a second, small reading of the tables."""

import re

from protocol_rows import BOUND_BY_ATTRIBUTE, NEEDS, ONE_OF, ROWS, TOGETHER

ACTIVATIONS = ["BF16", "F16", "F32"]
CLASSES = {"A": ACTIVATIONS, "W": ["BF16", "F32"]}
RANGES = {"n": (1, 8), "Nmax": (2, 8)}


def tensor_row(text):
    """name, optional, dtype class or list, dimensions of "name? A[T,n+1,d]"."""
    name, kind = text.split(" ", 1)
    dtypes, shape = kind.rstrip("]").split("[")
    return {
        "name": name.rstrip("?"),
        "optional": name.endswith("?"),
        "class": dtypes,
        "dtypes": CLASSES.get(dtypes) or dtypes.split("/"),
        "shape": shape.split(","),
    }


def attribute_row(text):
    match = re.fullmatch(
        r"(\w+) (\S+)(?: \[(\S+)\])?(?: = (\S+))?(?: \((with|without) (\w+)\))?", text
    )
    name, kind, bounds, default, condition, other = match.groups()
    row = {
        "name": name,
        "type": "string" if "/" in kind else kind,
        "values": kind.split("/") if "/" in kind else None,
        "range": bounds,
        "default": default,
    }
    if condition:
        row[f"required_{condition}"] = other
    return row


def inputs_of(name):
    return {row["name"]: row for row in map(tensor_row, ROWS[name][1])}


def attributes_of(name):
    return {row["name"]: row for row in map(attribute_row, ROWS[name][2])}


def outputs_of(name):
    return {row["name"]: row for row in map(tensor_row, ROWS[name][3])}


def _flattens(name):
    rows = [*inputs_of(name).values(), *outputs_of(name).values()]
    return "cu_seqlens" not in inputs_of(name) and not any("T" in r["shape"][1:] for r in rows)


def _bind(expression, value, symbols):
    """True when expression = value is possible; learns a symbol of which it says the value."""
    unknown = [s for s in re.findall(r"[A-Za-z_]\w*", expression) if s not in symbols]
    if not unknown:
        if "/" in expression:
            above, below = (symbols[s] for s in expression.split("/"))
            return above % below == 0 and above // below == value
        return eval(expression, {}, symbols) == value  # only rows of protocol_rows.py get here
    if len(unknown) > 1:
        return None
    if isinstance(value, tuple):
        near = [value]
    else:  # a factor may be far from the product
        near = range(0 if "*" in expression else max(0, value - 1), value + 2)
    fitting = [s for s in near if eval(expression, {}, {**symbols, unknown[0]: s}) == value]
    if not fitting:
        return None
    symbols[unknown[0]] = fitting[0]
    return True


def legal(name, inputs, attrs):
    """Whether the table of `name` allows these dtypes and shapes, with these attributes."""
    rows = inputs_of(name)
    if set(inputs) - set(rows):
        return False
    together = [([], group) for group in TOGETHER.get(name, [])]
    for first, second in [ONE_OF[name]] if name in ONE_OF else []:
        if {x for x in (*first, *second) if x in inputs} not in ({*first}, {*second}):
            return False
    for _, group in together:
        if len({x in inputs for x in group}) > 1:
            return False
    if any(x in inputs and other not in inputs for x, other in NEEDS.get(name, {}).items()):
        return False
    if any(row["name"] not in inputs and not row["optional"] for row in rows.values()):
        return False
    for x, row in attributes_of(name).items():
        other = row.get("required_with") or row.get("required_without")
        if other and x not in attrs and (other in inputs) is ("required_with" in row):
            return False
    if any(inputs[x].dtype not in rows[x]["dtypes"] for x in inputs):
        return False
    if len({inputs[x].dtype for x in inputs if rows[x]["class"] == "A"}) > 1:
        return False

    symbols = {
        x: int(row["default"])
        for x, row in attributes_of(name).items()
        if row["type"] == "int" and row["default"] is not None
    }
    symbols |= {x: value for x, value in attrs.items() if type(value) is int}
    symbols |= {s: attrs[x] for s, x in BOUND_BY_ATTRIBUTE.get(name, {}).items()}
    if "cu_seqlens" not in inputs:
        symbols["B"] = 1
    equations = []
    for x, t in inputs.items():
        dims, shape = rows[x]["shape"], list(t.shape)
        if dims[0] == "T" and _flattens(name) and len(shape) >= len(dims):
            lead = len(shape) - len(dims) + 1
            shape = [tuple(shape[:lead]), *shape[lead:]]
        if len(shape) != len(dims):
            return False
        equations += zip(dims, shape)
    equations += [
        ("(Nmax-1)*Kh", value)
        for dim, value in equations
        if dim == "C" and "Kh" in [d for d, _ in equations]
    ]
    for _ in range(len(equations)):
        for dim, value in equations:
            if _bind(dim, value, symbols) is False:
                return False
    if any(_bind(dim, value, symbols) is not True for dim, value in equations):
        return False
    if "hd" in symbols and "group" in symbols and symbols["hd"] % symbols["group"]:
        return False
    return all(low <= symbols[s] <= high for s, (low, high) in RANGES.items() if s in symbols)
