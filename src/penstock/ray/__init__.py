"""Penstock on Ray: a Ray Serve application (``serve run penstock.ray:app``), and an engine for Ray Serve LLM
(``penstock.ray.llm``). Needs the extra ``ray``."""

try:
    import ray.serve
except ImportError as error:
    raise ImportError(f"penstock.ray needs Ray Serve ({error}); try pip install 'penstock-llm[ray]'") from error

from .application import Arguments, app
