"""Models that an API process knows."""

from __future__ import annotations

import pytest
from scripted_engine import clear_registry

from penstock import PenstockError
from penstock.config.options import ServerOptions
from penstock.serve.metrics import Metrics
from penstock.serve.models.served_models import ServedModels


def test_model_list_is_unavailable_before_supervisor_announces_models() -> None:
    """Clients that take the first model of an empty list would fail."""
    clear_registry()  # other tests may have created metrics in this process
    served_models = ServedModels(ServerOptions(), Metrics())
    with pytest.raises(PenstockError, match="the engine is starting"):
        served_models.listed()
    served_models.set_models(())
    assert served_models.listed() == ()
