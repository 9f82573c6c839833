"""The public application."""

from fastapi import FastAPI

from kvpilot.engine.async_engine import AsyncEngine
from kvpilot.engine.model.tokenizer import Tokenizer
from kvpilot.engine.server.http import add_error_handlers
from kvpilot.engine.server.openai import MetricsSource, OpenAIService

MAX_BODY_BYTES = 8 << 20


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    model_name: str,
    metrics: MetricsSource,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """OpenAI API, health and metrics. The admin API is an application of its own (`create_admin_app`)."""
    app = FastAPI(openapi_url=None)
    add_error_handlers(app)
    service = OpenAIService(engine, tokenizer, model_name, metrics, max_body_bytes=max_body_bytes)
    app.include_router(service.router())
    return app
