"""Lowering of a JSON schema to what xgrammar 0.2.8 holds: every keyword is held, narrowed, or refused with its path."""
import copy, json, math, re
from urllib.parse import unquote, urljoin, urldefrag
import jsonschema, referencing, referencing.jsonschema
from dllm.grammar import patterns_ast
from dllm.grammar.rules import Unsupported

ALL = ("object", "array", "string", "number", "boolean", "null")
SPEAKS = {"string": "minLength maxLength pattern format", "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
          "array": "items prefixItems minItems maxItems uniqueItems contains minContains maxContains unevaluatedItems additionalItems",
          "object": "properties required additionalProperties patternProperties propertyNames minProperties maxProperties dependentRequired dependentSchemas dependencies unevaluatedProperties"}
OWNER = {key: kind for kind, keys in SPEAKS.items() for key in keys.split()}
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const", "type")
MAPS, LISTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties")
NEVER, MOST_ALTS, MOST_NODES = object(), 64, 4000


def refuse(key, path, why="answers cannot be held to it"):
    raise Unsupported(f"The schema uses '{key}' at '{path or '#'}': {why}. Leave it out.")


class Part(tuple):  # (schema, base URI, path)
    __hash__ = lambda self: id(self[0]) if isinstance(self[0], dict) else hash(self[0])
    __eq__ = lambda self, other: self[0] is other[0]


class Lowering:
    def __init__(self, root):
        self.root, self.index, self.defs, self.done, self.active, self.nodes = root, {}, {}, {}, [], 0
        self.base = root.get("$id", "") if isinstance(root, dict) else ""
        self.walk(root, "", "")
        resource = referencing.Resource.from_contents(root, default_specification=referencing.jsonschema.DRAFT202012)
        self.registry = referencing.Registry().with_resource(self.base or "", resource)

    def walk(self, s, base, path):
        if not isinstance(s, dict):
            return
        if isinstance(s.get("$id"), str):
            base = urljoin(base, s["$id"])
            self.index[urldefrag(base)[0]] = (s, base, path)
        elif path == "":
            self.index[base] = (s, base, path)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(s.get(key), str):
                self.index[urldefrag(base)[0] + "#" + s[key]] = (s, base, path)
        for key, value in s.items():
            inner = ([(f"/{n}", v) for n, v in value.items()] if key in MAPS and isinstance(value, dict) else
                     [(f"/{i}", v) for i, v in enumerate(value)] if key in LISTS and isinstance(value, list) else [("", value)] if key in SINGLE else [])
            for end, v in inner:
                self.walk(v, base, f"{path}/{key}{end}")

    def resolve(self, ref, base, path):
        whole = urljoin(base, ref) if ref[:1] != "#" else urldefrag(base)[0] + ref
        url, fragment = urldefrag(whole)
        if fragment and not fragment.startswith("/"):
            if whole not in self.index:
                refuse("$ref", path, f"{ref!r} is not in the schema")
            return Part(self.index[whole])
        if url not in self.index:
            refuse("$ref", path, f"{ref!r} is not in the schema")
        at, base, where = self.index[url]
        for name in unquote(fragment).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            try:
                at = at[int(name)] if isinstance(at, list) else at[name]
            except (KeyError, IndexError, ValueError, TypeError):
                refuse("$ref", path, f"{ref!r} is not in the schema")
            where += "/" + name
            if isinstance(at, dict) and isinstance(at.get("$id"), str) and at is not self.index[url][0]:
                base = urljoin(base, at["$id"])
        return Part((at, base, where))

    def valid(self, part, value):
        v = jsonschema.Draft202012Validator(part[0], registry=self.registry, _resolver=self.registry.resolver(part[1]), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        try:
            return v.is_valid(value)
        except referencing.exceptions.Unresolvable:
            refuse("$ref", part[2], "it is not in the schema")

    # A conjunction of parts -> alternatives: flat dicts, keyword -> value; inner schemas are tuples of parts.
    def expand(self, part, open_=()):
        s, base, path = part
        if isinstance(s, bool):
            return [{}] if s else []
        if not isinstance(s, dict):
            refuse(path.rsplit("/", 1)[-1], path, "it is no schema")
        if isinstance(s.get("$id"), str) and path:
            base = urljoin(base, s["$id"])
        if len(open_) > 50 or part in open_:
            refuse("$ref", path, "it leads back to itself")
        open_ += (part,)
        sub = lambda key, value: (Part((value, base, f"{path}/{key}")),)
        flat = {"bad": []}
        if "type" in s:
            flat["type"] = set([s["type"]] if isinstance(s["type"], str) else s["type"])
        if "const" in s or "enum" in s:
            values = s.get("enum", [s.get("const")])
            flat["enum"] = [v for v in values if self.valid(Part((s, base, path)), v)]
            return [flat] if flat["enum"] else []
        for key, value in s.items():
            where = f"{path}/{key}"
            if key in UPPER + LOWER:
                flat[key] = value
            elif key == "pattern" or (key == "format" and isinstance(value, str)):
                flat[key] = value
            elif key == "multipleOf" and value == 1:
                flat["integer"] = True
            elif key in ("items", "additionalProperties", "propertyNames"):
                flat[key] = sub(key, value)
            elif key == "prefixItems":
                flat[key] = [sub(f"{key}/{i}", v) for i, v in enumerate(value)]
            elif key in ("properties", "patternProperties"):
                flat[key] = {n: sub(f"{key}/{n}", v) for n, v in value.items()}
            elif key == "required":
                flat[key] = list(value)
            elif key == "dependentRequired" and isinstance(value, dict) and all(k in s.get("required", ()) for k in value):
                flat["required"] = [*s["required"], *(n for v in value.values() for n in v)]
            elif (key, value) in (("uniqueItems", False), ("dependentRequired", {}), ("unevaluatedItems", True), ("unevaluatedProperties", True)) or key in ("minContains", "maxContains") and "contains" not in s:
                pass
            elif key in OWNER or key in ("$dynamicRef", "$recursiveRef", "if", "not"):
                flat["bad"].append((OWNER.get(key), key, where))
        alts = [flat]
        if "$ref" in s:
            alts = self.product(alts, self.expand(self.resolve(s["$ref"], base, path + "/$ref"), open_), path)
        for i, one in enumerate(s.get("allOf", ())):
            alts = self.product(alts, self.expand(*sub(f"allOf/{i}", one), open_), path)
        for key in ("anyOf", "oneOf"):
            if key in s:
                each = [self.expand(*sub(f"{key}/{i}", one), open_) for i, one in enumerate(s[key])]
                if key == "oneOf":
                    self.apart(each, f"{path}/{key}")
                alts = self.product(alts, [alt for one in each for alt in one], path)
        return alts

    def product(self, left, right, path):
        if len(left) * len(right) > MOST_ALTS:
            refuse("allOf" if len(left) > 1 else "anyOf", path, f"more than {MOST_ALTS} alternatives")
        return [m for a in left for b in right if (m := self.merge(a, b)) is not NEVER]

    def merge(self, a, b):
        out = {"bad": a.get("bad", []) + b.get("bad", [])}
        for key in {**a, **b}:
            x, y = a.get(key), b.get(key)
            if key == "bad" or key in ("properties", "patternProperties", "prefixItems", "items", "additionalProperties"):
                continue
            if x is None or y is None:
                out[key] = copy.copy(y if x is None else x)
            elif key == "type":
                out[key] = {t for t in x if t in y or t == "integer" and "number" in y} | {t for t in y if t == "integer" and "number" in x}
                if not out[key]:
                    return NEVER
            elif key == "enum":
                out[key] = [v for v in x if any(json.dumps(v) == json.dumps(w) for w in y)]
            elif key in UPPER + LOWER:
                out[key] = (min if key in UPPER else max)(x, y)
            elif key == "propertyNames":
                out[key] = x + y
            elif key == "required":
                out[key] = list(dict.fromkeys(x + y))
            elif x == y:
                out[key] = x
            else:
                out[key] = x
                out["bad"].append((OWNER[key], key, "allOf (two of them)"))
        extra = lambda o, n: o.get("properties", {}).get(n, ()) + sum((c for p, c in o.get("patternProperties", {}).items() if re.search(p, n)), ()) or o.get("additionalProperties", ())
        if "properties" in a or "properties" in b:
            out["properties"] = {n: tuple(dict.fromkeys(extra(a, n) + extra(b, n))) for n in {**a.get("properties", {}), **b.get("properties", {})}}
        if "patternProperties" in a or "patternProperties" in b:
            both = [{"additionalProperties", "patternProperties"} & set(o) for o in (a, b)]
            if all(both):
                out["bad"].append(("object", "patternProperties", "allOf (beside others)"))
            out["patternProperties"] = a.get("patternProperties") or b.get("patternProperties")
        if more := a.get("additionalProperties", ()) + b.get("additionalProperties", ()):
            out["additionalProperties"] = more
        item = lambda o, i: o["prefixItems"][i] if i < len(o.get("prefixItems", ())) else o.get("items", ())
        if n := max(len(a.get("prefixItems", ())), len(b.get("prefixItems", ()))):
            out["prefixItems"] = [item(a, i) + item(b, i) for i in range(n)]
        if more := a.get("items", ()) + b.get("items", ()):
            out["items"] = more
        return out

    def apart(self, each, path):
        """oneOf is anyOf where no value is of two alternatives: other types, other values, another tag."""
        for i, one in enumerate(each):
            for a in one:
                for b in (b for other in each[i + 1:] for b in other):
                    m = self.merge({k: v for k, v in a.items() if k != "enum"}, {k: v for k, v in b.items() if k != "enum"})
                    if m is NEVER or ("enum" in a and "enum" in b and not any(v == w for v in a["enum"] for w in b["enum"])):
                        continue
                    tags = set(a.get("properties", ())) & set(b.get("properties", ()))
                    both = [(n, *(self.finite(o["properties"][n]) for o in (a, b))) for n in tags]
                    tag = next((n for n, x, y in both if x and y and not any(v == w for v in x for w in y)), None)
                    if tag is None or m.get("type") != {"object"}:
                        refuse("oneOf", path, "two of its schemas may hold the same value; write 'anyOf'")
                    for o in (a, b):
                        o["required"] = list(dict.fromkeys([*o.get("required", ()), tag]))

    def finite(self, conj):
        alts = [alt for part in conj for alt in self.expand(part)] if len(conj) == 1 else []
        return [v for alt in alts for v in alt["enum"]] if alts and all("enum" in alt for alt in alts) else None

    def emit(self, conj):
        """The lowered schema of a conjunction of parts, or NEVER."""
        conj = tuple(dict.fromkeys(conj))
        if len(conj) == 1 and isinstance(conj[0][0], dict) and not set(conj[0][0]) & ({*OWNER, *IN_PLACE, "not", "if", "$dynamicRef", "$recursiveRef"}):
            return {}
        self.nodes += 1
        if self.nodes > MOST_NODES:
            refuse("$ref", conj[0][2] if conj else "", "the schema grows too large with its references written out")
        named = any(isinstance(p[0], dict) and "$ref" in p[0] for p in conj)
        if conj in self.done:
            return {"$ref": "#/$defs/" + self.done[conj]}
        if conj in (keys := [c for c, _ in self.active]):
            self.active[keys.index(conj)][1].append(1)
            return {"$ref": f"#/$defs/{self.name(conj)}"}
        self.active.append((conj, []))
        alts = [{"bad": []}]
        for part in conj:
            alts = self.product(alts, self.expand(part), part[2])
        out = []
        for alt in alts:
            out += [n for n in self.typed(alt, conj) if n is not NEVER and n not in out]
        _, used = self.active.pop()
        node = NEVER if not out else out[0] if len(out) == 1 else {"anyOf": out}
        if node is not NEVER and (used or named and "$ref" not in node and node != {}):
            self.defs[self.name(conj)] = node
            self.done[conj] = self.name(conj)
            return {"$ref": "#/$defs/" + self.name(conj)}
        return node

    def name(self, conj):
        self.names = getattr(self, "names", {})
        return self.names.setdefault(conj, f"r{len(self.names)}")

    def typed(self, alt, conj):
        if "enum" in alt:
            values = [v for v in alt["enum"] if all(self.valid(p, v) for p in conj)]
            return [{"enum": values}] if values else []
        spoken = [t for t in ALL if t in {OWNER.get(k) for k in alt} | {t for t, _, _ in alt["bad"]}] or (["number"] if "integer" in alt else [])
        types = alt.get("type") or spoken or ALL
        for kind, key, path in alt["bad"]:
            if kind is None or kind in types or kind == "number" and "integer" in types:
                refuse(key, path)
        if set(types) == set(ALL) and not spoken:
            return [{}]
        kinds = [t for t in types if not (t == "integer" and "number" in types)]
        return [getattr(self, t, lambda a, t=t: {"type": t})(alt) for t in sorted(kinds, key=(*ALL, "integer").index)]

    def number(self, a):
        if a.get("integer"):
            return self.integer(a)
        node = {"type": "number"} | {k: a[k] for k in a if OWNER.get(k) == "number"}
        low, high = node.get("minimum", -math.inf), node.get("maximum", math.inf)
        if node.get("exclusiveMinimum", -math.inf) >= low: node.pop("minimum", 0)
        else: node.pop("exclusiveMinimum", 0)
        if node.get("exclusiveMaximum", math.inf) <= high: node.pop("maximum", 0)
        else: node.pop("exclusiveMaximum", 0)
        return NEVER if max(low, a.get("exclusiveMinimum", low)) > min(high, a.get("exclusiveMaximum", high)) else node

    def integer(self, a):
        low = max([math.ceil(a["minimum"])] if "minimum" in a else [], default=None)
        if "exclusiveMinimum" in a: low = max(math.floor(a["exclusiveMinimum"]) + 1, low if low is not None else -math.inf)
        high = min([math.floor(a["maximum"])] if "maximum" in a else [], default=None)
        if "exclusiveMaximum" in a: high = min(math.ceil(a["exclusiveMaximum"]) - 1, high if high is not None else math.inf)
        if low is not None and high is not None and low > high:
            return NEVER
        return {"type": "integer"} | ({"minimum": low} if low is not None else {}) | ({"maximum": high} if high is not None else {})

    def counts(self, a, *keys):
        return {k: int(a[k]) for k in keys if k in a and not (k.startswith("min") and a[k] <= 0)}

    def string(self, a):
        node = {"type": "string"} | self.counts(a, "minLength", "maxLength")
        if node.get("minLength", 0) > node.get("maxLength", math.inf):
            return NEVER
        pattern = a.get("pattern")
        if "format" in a:
            if pattern is not None or len(node) > 1:
                refuse("format", "", "beside 'pattern' or a length answers cannot be held to it")
            form = patterns_ast.FORMATS.get(a["format"])
            if form is None:
                refuse("format", "", f"{a['format']!r} is not known")
            if form is True:
                return node | {"format": a["format"]}
            pattern = form
        if pattern is not None:
            if len(node) > 1:
                refuse("pattern", "", "beside a length answers cannot be held to it")
            node["pattern"] = patterns_ast.lowered(pattern)
        return node

    def array(self, a):
        low, high = int(a.get("minItems", 0)), a.get("maxItems")
        prefix = [self.emit(c) for c in a.get("prefixItems", ())][: int(high) if high is not None else None]
        rest = self.emit(a.get("items", ()))
        if NEVER in prefix:
            prefix, rest = prefix[: prefix.index(NEVER)], NEVER
        high = min(high if high is not None else math.inf, len(prefix) if rest is NEVER or len(prefix) == high else math.inf)
        if low > high:
            return NEVER
        if prefix and low < len(prefix):  # xgrammar writes all of them: fewer only where it must be
            low = len(prefix)
        node = {"type": "array", "minItems": low} if low else {"type": "array"}
        if high == 0:
            return node | {"maxItems": 0}
        if prefix:
            node["prefixItems"] = prefix
        if len(prefix) == high:
            return {"type": "array", "prefixItems": prefix, "items": False}
        return node | {"items": rest} | ({"maxItems": int(high)} if high < math.inf else {})

    def object(self, a):
        declared, patterns, free = dict(a.get("properties", {})), a.get("patternProperties", {}), a.get("additionalProperties", ())
        required, names = a.get("required", []), a.get("propertyNames", ())
        limits = self.counts(a, "minProperties", "maxProperties")
        if names and (values := self.finite(names)) is not None:
            for n in values:
                if isinstance(n, str):
                    declared.setdefault(n, sum((c for p, c in patterns.items() if re.search(p, n)), ()) or free)
            patterns, closed = {}, True
        else:
            closed = False
        for n in required:
            declared.setdefault(n, sum((c for p, c in patterns.items() if re.search(p, n)), ()) or free)
        props = {}
        for n, c in declared.items():
            c += sum((x for p, x in patterns.items() if re.search(p, n) and x[0] not in c), ())
            lowered = self.emit(c) if all(self.valid(p, n) for p in names) else NEVER
            if lowered is not NEVER:
                props[n] = lowered
            elif n in required:
                return NEVER
            else:
                closed = True
        if closed or (declared and (patterns or names or "additionalProperties" not in a)):
            rest = NEVER
        elif names or patterns or any(not c.isascii() or ord(c) < 32 or c in '"\\' for n in declared for c in n):
            rest = NEVER  # xgrammar's free names beside such a name are no UTF-8 or no JSON
        else:
            rest = self.emit(free)
        node = {"type": "object"} | ({"properties": props} if props else {}) | ({"required": required} if required else {})
        most = limits.get("maxProperties", math.inf)
        if len(required) > most or limits.get("minProperties", 0) > most:
            return NEVER
        if not declared and not closed and (names or patterns):
            if len(patterns) + bool(names) > 1 or limits.get("minProperties", 0) > 1:
                refuse("propertyNames" if names else "patternProperties", "", "beside others of them answers cannot be held to it")
            if names:
                alts = [x for p in names for x in self.expand(p)]
                if not alts:
                    return node | {"maxProperties": 0} if "minProperties" not in limits else NEVER
                if alts == [{}] or alts == [{"bad": []}]:
                    rest = self.emit(free)
                    return node | limits | {"additionalProperties": rest if rest is not NEVER else False}
                if len(alts) != 1 or set(alts[0]) - {"bad", "type", "pattern"}:
                    refuse("propertyNames", names[0][2])
                patterns = {alts[0].get("pattern", ".*"): free}
            pattern, c = next(iter(patterns.items()))
            value = self.emit(c)
            if value is NEVER:
                return node | {"additionalProperties": False} if "minProperties" not in limits else NEVER
            return node | limits | {"patternProperties": {patterns_ast.lowered(pattern): value}, "additionalProperties": False}
        if rest is NEVER:
            if limits.get("minProperties", 0) > len(props):
                return NEVER
            limits = {k: v for k, v in limits.items() if not (k == "maxProperties" and v >= len(props)) and not (k == "minProperties" and v <= len(required))}
        elif limits.get("minProperties", 0) > max(1, len(required) + 1):
            refuse("minProperties", "", "a free name may come twice")
        return node | limits | {"additionalProperties": False if rest is NEVER else rest}


def lower(schema):
    try:
        low = Lowering(schema)
        node = low.emit((Part((schema, low.base, "")),))
    except RecursionError:
        refuse("$ref", "", "it is nested too deeply")
    if node is NEVER:
        raise Unsupported("The schema allows no value. Correct it.")
    return ({"$defs": low.defs} if low.defs else {}) | node
