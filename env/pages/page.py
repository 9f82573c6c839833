"""One HTML page that needs nothing else: what every report is rendered by."""

from collections.abc import Sequence
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from kvpilot.env.pages.figure import Figure

PACKAGE = "kvpilot.env.pages"


def render_page(package: str, template: str, *, charts: Sequence[Figure], **values: Any) -> str:
    """`template` of `package`, which extends page.html.j2 and may import from parts.html.j2.

    `charts` are drawn where the page has an element of their id.
    """
    loader = ChoiceLoader([PackageLoader(name, ".") for name in (package, PACKAGE)])
    return (
        Environment(autoescape=True, loader=loader)
        .get_template(template)
        .render(
            charts=charts,
            chart_json=htmlsafe_json_dumps(charts, allow_nan=False),
            plotly=Markup(get_plotlyjs()),
            **values,
        )
    )
