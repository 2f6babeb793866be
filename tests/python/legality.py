"""Which inputs the rows of protocol_rows.py allow: a second, small reading of the tables."""

import re

from protocol_rows import BOUND_BY_ATTRIBUTE, NEEDS, ONE_OF, ROWS, TOGETHER

ACTIVATIONS = ["BF16", "F16", "F32"]
CLASSES = {"A": ACTIVATIONS, "W": ["BF16", "F32"]}
RANGES = {"n": (1, 8), "Nmax": (2, 8), "M": (1, 80), "Q": (1, 3)}
# Symbols of the mHC family that stand for others. The reduction of split takes any N.
DERIVED = {"N": "n*n+2*n", "K": "n*d"}


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


def row_of(name, x):
    """The row of input x; that of a list for one of its members."""
    rows = inputs_of(name)
    return rows.get(x) or rows.get(re.sub(r"\.(0|[1-9]\d*)$", ".L", x))


def _flattens(name):
    rows = [*inputs_of(name).values(), *outputs_of(name).values()]
    if "cu_seqlens" in inputs_of(name) or any("G?" in r["shape"] for r in rows):
        return False
    return not any("T" in r["shape"][1:] for r in rows)


def _lists(name, inputs):
    """Whether lists have no holes and fit one another: pre may have one member more."""
    lists = {x: [y for y in inputs if row_of(name, y)["name"] == x] for x in inputs_of(name)}
    lists = {x: names for x, names in lists.items() if x.endswith(".L")}
    for x, names in lists.items():
        if set(names) != {f"{x[:-1]}{layer}" for layer in range(len(names))}:
            return False
    if not lists:
        return True
    first, *others = map(len, lists.values())
    return first >= 1 and len(set(others)) == 1 and others[0] in (first - 1, first)


def _bind(expression, value, symbols):
    """True when expression = value is possible; learns a symbol of which it says the value."""
    unknown = [*{*re.findall(r"[A-Za-z_]\w*", expression)} - {*symbols}]
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


def _dimensions(rows, inputs):
    """[(row's dimension, value)], without an axis G? that is absent; None: ranks do not fit."""
    equations, present = [], set()
    for x, t in inputs.items():
        dims, shape = list(rows[x]["shape"]), list(t.shape)
        if "G?" in dims:
            present.add(len(shape) == len(dims))
            place = dims.index("G?")
            dims[place : place + 1] = ["G"] if len(shape) == len(dims) else []
        if dims[:1] == ["T"] and rows[x]["flattens"] and len(shape) >= len(dims):
            lead = len(shape) - len(dims) + 1
            shape = [tuple(shape[:lead]), *shape[lead:]]
        if len(shape) != len(dims):
            return None
        equations += zip(dims, shape)
    return None if len(present) > 1 else equations


def legal(name, inputs, attrs):
    """Whether the table of `name` allows these dtypes and shapes, with these attributes."""
    table = inputs_of(name)
    rows = {x: row_of(name, x) for x in inputs}
    if not all(rows.values()) or not _lists(name, inputs):
        return False
    rows = {x: {**row, "flattens": _flattens(name)} for x, row in rows.items()}
    for first, second in [ONE_OF[name]] if name in ONE_OF else []:
        if {x for x in (*first, *second) if x in inputs} not in ({*first}, {*second}):
            return False
    if any(len({x in inputs for x in group}) > 1 for group in TOGETHER.get(name, [])):
        return False
    if any(x in inputs and other not in inputs for x, other in NEEDS.get(name, {}).items()):
        return False
    missing = set(table) - {row["name"] for row in rows.values()}
    if any(not table[x]["optional"] for x in missing):
        return False
    for x, row in attributes_of(name).items():
        other = row.get("required_with") or row.get("required_without")
        if other and x not in attrs and (other in inputs) is ("required_with" in row):
            return False
    if any(t.dtype not in rows[x]["dtypes"] for x, t in inputs.items()):
        return False
    if len({t.dtype for x, t in inputs.items() if rows[x]["class"] == "A"}) > 1:
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
    equations = _dimensions(rows, inputs)
    if equations is None:
        return False
    equations += [
        ("(Nmax-1)*Kh", value)
        for dim, value in equations
        if dim == "C" and "Kh" in [d for d, _ in equations]
    ]
    if name.startswith("mhc."):
        used = {s for row in (*table.values(), *outputs_of(name).values()) for s in row["shape"]}
        equations += [
            (DERIVED[dim], value)
            for dim, value in equations
            if dim in DERIVED and {*re.findall(r"[a-z]+", DERIVED[dim])} <= used
        ]
    for _ in range(len(equations)):
        for dim, value in equations:
            if _bind(dim, value, symbols) is False:
                return False
    if any(_bind(dim, value, symbols) is not True for dim, value in equations):
        return False
    if "hd" in symbols and "group" in symbols and symbols["hd"] % symbols["group"]:
        return False
    if "groups" in symbols and symbols["K"] % symbols["groups"]:
        return False
    if "G" in symbols and symbols.get("k", symbols.get("K", 0)) % symbols["G"]:
        return False
    return all(low <= symbols[s] <= high for s, (low, high) in RANGES.items() if s in symbols)
