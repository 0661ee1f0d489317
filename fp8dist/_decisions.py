"""What group rank 0 decides for all in an agreement. Pure functions of what the ranks brought."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ._layout import entries_from_plain, format_ranks, layout_to_plain, merge
from .errors import RanksDisagree

Brought = Sequence[tuple[Any, list[int]]]


def said(values: Mapping[str, Sequence[int]]) -> str:
    """`x on ranks 0-2; y on rank 3`, at most 16 values."""
    listed = [f"{value} on {format_ranks(ranks)}" for value, ranks in list(values.items())[:16]]
    return "; ".join(listed) + ("; ..." if len(values) > 16 else "")


def by_value(brought: Brought, key: str) -> dict[str, list[int]]:
    """Ranks grouped by what they brought under `key`."""
    groups: dict[str, list[int]] = {}
    for payload, ranks in brought:
        groups.setdefault(str(payload[key]), []).extend(ranks)
    return groups


def layout(brought: Brought) -> dict[str, Any]:
    """Union of the declared slots, and a name for a communicator.

    Raises:
        RanksDisagree: the recipes differ; the message names the fields.
        LayoutMismatch: one name means different things.
    """
    if len(by_value(brought, "recipe")) > 1:
        fields: dict[str, dict[str, list[int]]] = {}
        for payload, ranks in brought:
            for name, value in payload["recipe_fields"].items():
                fields.setdefault(name, {}).setdefault(value, []).extend(ranks)
        differing = [f"{name}: {said(values)}" for name, values in fields.items() if len(values) > 1]
        raise RanksDisagree(
            "all ranks of a coordinator expect one recipe but they differ in\n  "
            + ("\n  ".join(differing) or "the code of a function")
            + "\nbuild the recipe from the same configuration on every rank",
            field="recipe",
        )
    declared = [(entries_from_plain(payload["entries"]), ranks) for payload, ranks in brought]
    return {"layout": layout_to_plain(merge(declared)), "communicator": secrets.token_hex(8)}


def recovery(brought: Brought) -> dict[str, Any]:
    """The generation all ranks go to, and a name for the new communicator.

    Raises:
        RanksDisagree: some rank is further ahead than its undo record reaches, or shall be healed otherwise.
    """
    healers = by_value(brought, "heal_from")
    if len(healers) > 1:
        raise RanksDisagree(
            f"recover() expects the same heal_from on every rank but got {said(healers)}", field="heal_from"
        )
    healer = brought[0][0]["heal_from"]
    ranks = {rank: payload for payload, bringing in brought for rank in bringing}
    generations = {rank: payload["generation"] for rank, payload in ranks.items()}
    to = min(generations.values()) if healer is None else generations[healer]
    ahead = [rank for rank, at in generations.items() if at == to + 1 and ranks[rank]["undoable"]]
    level = [rank for rank, at in generations.items() if at == to or rank in ahead]
    if healer is None and len(level) < len(ranks):
        raise RanksDisagree(
            f"recover() expects all ranks within one commit of each other but their generations are "
            f"{said(by_value(brought, 'generation'))}; load one checkpoint on every rank instead",
            field="generation",
        )
    return {
        "generation": to,
        "ahead": ahead,
        "level": sorted(level),
        "communicator": secrets.token_hex(8),
        "started": max(payload["started"] for payload, _ in brought),
        "scopes": max(payload["scopes"] for payload, _ in brought),
        "relayout": len(by_value(brought, "layout")) > 1,
    }
