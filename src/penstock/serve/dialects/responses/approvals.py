"""Approvals of MCP calls in the input of a request."""

from __future__ import annotations

import msgspec

from penstock.core.errors import invalid
from penstock.serve.http.body import require

from .schema import Item


class ApprovedCall(msgspec.Struct, frozen=True):
    """A call that the client has approved, and that has not been executed."""

    label: str
    name: str
    arguments: str
    request_id: str
    """Id of the approval request."""


def resolve_approvals(items: list[Item]) -> tuple[list[Item], list[ApprovedCall]]:
    """Evaluate the approvals in the input of a request.

    Returns:
        The items, in which each rejected call is an ``mcp_call`` with an error, and the approved calls that are to be
        executed.

    Raises ``PenstockError`` (``invalid``) for an approval request without a response, and the other way round.
    """
    called = {item.approval_request_id for item in items if item.type == "mcp_call"}
    requests: dict[str, tuple[str, Item]] = {}
    result, approved = [], []
    for i, item in enumerate(items):
        path = f"input[{i}]"
        if item.type == "mcp_approval_request":
            requests[item.approval_request_id or require(item.id, f"{path}.id")] = path, item
        elif item.type == "mcp_approval_response":
            request_id = require(item.approval_request_id, f"{path}.approval_request_id")
            if request_id not in requests:
                message = f"there is no mcp_approval_request {request_id!r:.100} before this item; send it, too"
                raise invalid(f"{path}.approval_request_id", message)
            request_path, request = requests.pop(request_id)
            if require(item.approve, f"{path}.approve") is False:
                result.append(_rejected(request, item))
            elif request_id not in called:
                label = require(request.server_label, f"{request_path}.server_label")
                name = require(request.name, f"{request_path}.name")
                approved.append(ApprovedCall(label, name, request.arguments or "", request_id))
        else:
            result.append(item)
    if open_request := next(iter(requests.items()), None):
        name, (path, _) = open_request
        message = f"the MCP approval request {name!r:.100} has no mcp_approval_response; add one with approve true or"
        raise invalid(path, f"{message} false")
    return result, approved


def _rejected(request: Item, response: Item) -> Item:
    error = "the user did not approve this call" + (f": {response.reason}" if response.reason else "")
    return msgspec.structs.replace(request, type="mcp_call", error=error)
