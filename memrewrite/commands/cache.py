"""``memrewrite cache``: the plans that are kept, and their end. None of them is run."""

from typing import Any

from memrewrite.cache.store import Store, store_in
from memrewrite.commands.answer import Outcome, respond, say
from memrewrite.commands.requests import CacheRequest
from memrewrite.records.errors import InternalError, OutputError
from memrewrite.records.options import format_bytes
from memrewrite.report import kept_plans


def run(request: CacheRequest) -> int:
    """Carry out the request and give the exit code; raises ``OutputError`` for plans that cannot be removed."""
    store = store_in(request.cache)
    if store is None:
        raise InternalError("A request without a folder of plans was let through.")
    return respond(request, lambda stage: _clear(store) if request.clear else _show(store, request.verbose))


def _show(store: Store, verbose: bool) -> Outcome:
    found = store.listed()
    plans: list[dict[str, Any]] = [{"key": each.key, "bytes": each.bytes, **each.facts} for each in found]
    size = sum(each.bytes for each in found)
    payload = {"folder": str(store.folder), "removed": 0, "bytes": size, "plans": plans}
    return Outcome(payload, lambda console: kept_plans.show(plans, store.folder, console, verbose=verbose))


def _clear(store: Store) -> Outcome:
    try:
        count, size = store.clear()
    except OSError as error:
        raise OutputError(f"{error.filename} cannot be removed: {error.strerror}; remove it by hand.") from error
    line = f"Removed {kept_plans.counted(count)}, {format_bytes(size)}, from {store.folder}"
    payload = {"folder": str(store.folder), "removed": count, "bytes": 0, "plans": []}
    return Outcome(payload, lambda console: say(console, line))
