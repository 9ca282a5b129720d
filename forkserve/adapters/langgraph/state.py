"""What the adapter keeps in graph state: refs, and the channels that carry them.

A ref is plain JSON of about 120 bytes, so that any saver stores it, also with strict msgpack.  It
names a node of an engine's tree; whoever holds one resolves it or re-opens from rendered state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from langgraph.channels.last_value import LastValue
from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # LangGraph's: a state may derive from both

from forkserve.errors import AdapterError

__all__ = [
    "PRIVATE",
    "ForkBranchState",
    "ForkModel",
    "ForkState",
    "Ref",
    "TipChannel",
    "checked",
    "field",
    "is_ref",
    "merge_refs",
    "same_place",
]

PRIVATE = "fork_"  # keys of state and Send arguments that belong to the adapter


class Ref(TypedDict):
    """A place in a tree.

    engine: the engine that made it; another process has another one.  gen: counts the sessions of
    that engine, so that no id ever means two things.  length: tokens from the root.  branch: first
    node of the branch it belongs to, 0 for the trunk.  index: place in the fan-out, or -1.
    """

    engine: str
    session: str
    gen: int
    node: int
    length: int
    branch: int
    index: int


def is_ref(value: Any) -> bool:
    """Whether a value has the form of a ref."""
    return isinstance(value, Mapping) and Ref.__annotations__.keys() <= value.keys()


def checked(value: Any) -> Ref:
    """A ref as it is.  Raises AdapterError for anything else."""
    kinds = Ref.__annotations__
    if not is_ref(value):
        raise AdapterError(
            f"{value!r:.100} is no ref: it has {', '.join(kinds)}; take it from fork_tip or "
            "fork_refs as it is"
        )
    return value  # type: ignore[no-any-return]


def same_place(a: Ref, b: Ref) -> bool:
    """Whether two refs name one node, whatever their roles."""
    return all(a[key] == b[key] for key in ("engine", "session", "gen", "node", "length"))


def merge_refs(
    old: Sequence[Ref] | None, new: Sequence[Ref] | Mapping[str, Sequence[Ref]] | None
) -> list[Ref]:
    """Reducer of ``fork_refs``: None empties the list, ``{"set": refs}`` replaces it.

    Otherwise the new refs are added; a later ref of the same branch takes the earlier one's place.
    """
    if new is None:
        return []
    if isinstance(new, Mapping):
        return list(new["set"])
    merged = list(old or ())
    for ref in new:
        for place, known in enumerate(merged):
            same = all(known[k] == ref[k] for k in ("engine", "session", "gen"))
            if same and (known["branch"] or known["node"]) == (ref["branch"] or ref["node"]):
                merged[place] = ref
                break
        else:
            merged.append(ref)
    return merged


class TipChannel(LastValue[Any]):
    """``fork_tip``: one value a step, unless all who write it agree."""

    __slots__ = ()

    def update(self, values: Sequence[Any]) -> bool:
        if len(values) > 1 and any(value != values[0] for value in values):
            raise AdapterError(
                f"{len(values)} nodes moved '{self.key}' in one step, so the trunk would have "
                f"{len(values)} ends; nodes that run side by side are branches: decorate them with "
                "@fs.node(role='branch'), or let a subgraph run as a branch keep ForkBranchState"
            )
        return super().update(values[-1:])


class ForkState(TypedDict, total=False):
    """Channels of a graph whose nodes fork; derive the state of the graph from it."""

    fork_tip: Annotated[Any, TipChannel]  # end of the trunk; trunk and join nodes write it
    fork_refs: Annotated[list[Any], merge_refs]  # one for each finished branch


class ForkBranchState(TypedDict, total=False):
    """Channels of a subgraph that runs as one branch of its parent (the target of a Send)."""

    fork_parent: Any  # where the next node goes on; comes with the Send
    fork_text: Any  # text the first node begins with; comes with the Send
    fork_refs: Annotated[list[Any], merge_refs]


class ForkModel(BaseModel):
    """`ForkState` for graphs whose state is a pydantic model."""

    fork_tip: Annotated[Any, TipChannel] = None
    fork_refs: Annotated[list[Any], merge_refs] = Field(default_factory=list)


def field(state: Any, name: str, default: Any = None) -> Any:
    """A field of a state that may be a mapping, a model or a dataclass."""
    if isinstance(state, Mapping):
        return state.get(name, default)
    return getattr(state, name, default)
