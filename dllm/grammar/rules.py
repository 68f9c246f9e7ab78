"""The grammars that xgrammar writes, read before it compiles them.

Compiled, each rule repeats the whole grammar: that takes memory by the square of its length.
"""

import itertools
import json
from collections.abc import Sequence

import networkx
import numpy as np

from dllm.grammar.characters import others
from dllm.grammar.classes import coarsest
from dllm.grammar.pattern_edges import EPSILON, Build, Edges, Texts, later
from dllm.grammar.patterns import HELD, read_held
from dllm.grammar.refusals import Unsupported

# Kinds of edges that read no byte, in the place of the lowest byte; kinds of expressions (0.2.8).
RULE, REPEAT = -2, -4
TEXT, CLASS, STAR, EMPTY, CALL, SEQUENCE, CHOICES, DISPATCH, REPEATED, PATTERN = *range(9), 12
FORM = "v16"  # of what xgrammar writes
MOST_UNROLLED = 16  # characters that have states of their own


class Rules(Edges):
    """All rules; their states are numbered together.

    Args:
        serialized: of xgrammar's ``Grammar.serialize_json()``.
        is_merged: states that read the same are one.

    Attributes:
        edges: of each state, [low, high, target]: a range of bytes; or, with RULE or REPEAT
            as low, high is the rule or the name of the repetition.
        repeats: by its name, the rule, and how often it is repeated: fewest, most (-1: no limit).
        starts: the first state of each rule.
        ends: states in which a rule may end.
        root: the rule of whole texts.
        firsts: of repetitions whose rounds are counted behind tokens (`counts`), by their names,
            the states at the beginning of a round.
        recursive_returns: what follows a recursive call, where the called rule may call the calling
            one again, directly or through others: ``(state, None)``; behind a repetition its name,
            too, because rules that are no part of a recursion end in the same states.
    """

    def __init__(self, serialized: str, is_merged: bool = True) -> None:
        super().__init__()
        grammar = json.loads(serialized)
        if grammar["__VERSION__"] != FORM:
            raise Unsupported(
                f"xgrammar's grammars have the form {grammar['__VERSION__']}; read are those of "
                f"{FORM}. Install the xgrammar that this version is tested with."
            )
        data, firsts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
        ends = [*firsts[1:], len(data)]
        self._expressions = [
            (data[at], data[at + 2 : end]) for at, end in zip(firsts, ends, strict=True)
        ]
        self.repeats: dict[int, tuple[int, int, int]] = {}
        self.starts = [self.state() for _ in grammar["rules"]]
        self.ends: set[int] = set()
        self._texts: dict[str, Texts] = {}
        for start, (_, body, *_) in zip(list(self.starts), grammar["rules"], strict=True):
            self._rule(start, later(self._add, body))
        self.root = grammar["root_rule_id"]
        self.recursive_returns = self._returns_of_recursion()
        if is_merged:
            self._merge()
        self.firsts = {
            name: self.inside([self.starts[rule]])
            for name, (rule, fewest, most) in self.repeats.items()
            if most - fewest > MOST_UNROLLED and self._is_simple(rule)
        }

    def _merge(self) -> None:
        """Take states that read the same as one: a schema says much twice."""
        class_of, kept = np.unique(self._classes(), return_inverse=True, return_index=True)[2:0:-1]
        number: list[int] = class_of.tolist()
        self.starts = [number[at] for at in self.starts]
        self.ends = {number[at] for at in self.ends}
        self.recursive_returns = {(number[at], name) for at, name in self.recursive_returns}
        for edge in itertools.chain(*self.edges):
            edge[2] = number[edge[2]]
        self.edges = [self.edges[at] for at in kept.tolist()]

    def _classes(self) -> np.ndarray:
        """The class of each state (`coarsest`).

        Those behind calls that count as levels of recursion stay apart from others.
        """
        kinds: dict[tuple[int, ...], int] = {}
        returns = {at for at, name in self.recursive_returns if name is None}
        own = [-1 - 2 * (at in self.ends) - (at in returns) for at in range(len(self.edges))]
        steps = []
        for at, edges in enumerate(self.edges):
            for low, high, to in edges:
                if low in (RULE, REPEAT):  # a state of its own, before the rule and what follows
                    rule, *limits = self.repeats[high] if low == REPEAT else (high,)
                    which = low, *limits, (to, high) in self.recursive_returns
                    call = len(own)
                    own.append(kinds.setdefault(which, len(kinds)))
                    steps += [(at, 0, call), (call, 1, self.starts[rule]), (call, 2, to)]
                else:
                    steps.append((at, 3 + kinds.setdefault((low, high), len(kinds)), to))
        source, kind, target = np.array(sorted(steps), dtype=np.int64).reshape(-1, 3).T
        drawn = np.random.default_rng(0).integers(1 << 63, size=len(kinds) + 3, dtype=np.uint64)
        return coarsest(np.array(own), source, target, drawn[kind])[: len(self.edges)]

    def _rule(self, start: int, build: Build) -> None:
        end = self.state()
        self.ends.add(end)
        build(start, end)

    def repeat(self, build: Build, fewest: int, most: int, at: int, to: int) -> None:
        rule, start = len(self.starts), self.state()
        self.starts.append(start)
        self._rule(start, build)
        self._repeat_rule(rule, fewest, most, at, to)

    def _repeat_rule(self, rule: int, fewest: int, most: int, at: int, to: int) -> None:
        name = len(self.repeats)
        self.repeats[name] = (rule, fewest, most)
        self.edges[at].append([REPEAT, name, to])

    def _add(self, number: int, at: int, to: int) -> None:
        """The edges of an expression."""
        kind, parts = self._expressions[number]
        if kind in (TEXT, EMPTY):
            word = self._word(number)
            if HELD.fullmatch(written := word.decode(errors="replace")):
                return self._texts_of(written, at, to)
            self.text(word, at, to)
        elif kind in (CLASS, STAR):
            ranges = list(zip(parts[1::2], parts[2::2], strict=True))
            if parts[0]:
                ranges = others(ranges)
            if kind == STAR:
                return self.loop(later(self.characters, ranges), at, to)
            self.characters(ranges, at, to)
        elif kind == CALL:
            self.edges[at].append([RULE, parts[0], to])
        elif kind == SEQUENCE:
            self.one_by_one([later(self._add, part) for part in parts], at, to)
        elif kind == CHOICES:
            for part in parts:
                self._add(part, at, to)
        elif kind == REPEATED:
            rule, fewest, most = parts
            self._repeat_rule(rule, fewest, most, at, to)
        elif kind == DISPATCH:
            self._dispatch(parts, at, to)
        elif kind == PATTERN:
            self._texts_of(bytes(byte & 255 for byte in parts[1:]).decode(), at, to)
        else:
            raise Unsupported("The grammar names tokens; allowed: text only.")
        return None

    def _dispatch(self, parts: Sequence[int], at: int, to: int) -> None:
        """Any text in which rules follow their triggers, and some texts are not (Aho 1975).

        Its states are beginnings of these texts: the longest one that the text ends with.
        """
        *tags, is_loop, excluded = parts
        words = dict(zip(map(self._word, tags[::2]), tags[1::2], strict=True))
        never = [*map(self._word, self._expressions[excluded][1])]
        begun = {
            word[:size]: self.state() for word in (*words, *never) for size in range(len(word))
        }
        begun.setdefault(b"", self.state())
        self.edges[at].append([EPSILON, 0, begun[b""]])
        letters = {byte for word in (*words, *never) for byte in word}
        cuts = sorted({0, 256, *letters, *(byte + 1 for byte in letters)})
        for before, state in begun.items():
            self.edges[state].append([EPSILON, 0, to])
            for low, high in itertools.pairwise(cuts):
                text = before + bytes([low])
                if any(map(text.endswith, never)):
                    continue
                rule = next((rule for word, rule in words.items() if text.endswith(word)), None)
                target = next(
                    begun[text[cut:]] for cut in range(len(text) + 1) if text[cut:] in begun
                )
                if rule is not None:
                    target = self.state()
                    self.edges[target].append([RULE, rule, begun[b""] if is_loop else to])
                self.edges[state].append([low, high - 1, target])

    def _word(self, number: int) -> bytes:
        return bytes(byte & 255 for byte in self._expressions[number][1])  # xgrammar has signs

    def _texts_of(self, pattern: str, at: int, to: int) -> None:
        asked = read_held(pattern)
        if (tree := asked.tree()) is not None:
            return self.tree(tree, asked.parts[0], asked.alphabet, at, to)
        if pattern not in self._texts:
            self._texts[pattern] = Texts(asked)
        texts = self._texts[pattern]
        states = [self.state() for _ in texts.edges]
        self.edges[at].append([EPSILON, 0, states[0]])
        for state, edges in zip(states, texts.edges, strict=True):
            self.edges[state] += [[low, high, states[target]] for low, high, target in edges]
        for end in texts.ends:
            self.edges[states[end]].append([EPSILON, 0, to])
        return None

    def _is_simple(self, rule: int) -> bool:
        """Whether a rule reads bytes alone."""
        inside = self.inside([self.starts[rule]], 255)
        return all(low >= EPSILON for at in inside for low, _, _ in self.edges[at])

    def _returns_of_recursion(self) -> set[tuple[int, int | None]]:
        """See ``recursive_returns``."""
        returns: list[tuple[int, int, tuple[int, int | None]]] = []  # (calling, called, behind)
        for rule, start in enumerate(self.starts):
            for at in self.inside([start], 255):
                for low, high, target in self.edges[at]:
                    if low == RULE:
                        returns.append((rule, high, (target, None)))
                    elif low == REPEAT:
                        returns.append((rule, self.repeats[high][0], (target, high)))
        graph = networkx.DiGraph([(calling, called) for calling, called, _ in returns])
        circles = networkx.strongly_connected_components(graph)
        circle_of = {rule: number for number, circle in enumerate(circles) for rule in circle}
        return {behind for rule, called, behind in returns if circle_of[rule] == circle_of[called]}
