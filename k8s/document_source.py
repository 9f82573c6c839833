"""Where a sidecar's control document comes from, and which one is in force: the rule for all sources."""

import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from kvpilot.k8s.control_document import ControlDocument, ControlDocumentError, parse_control_document

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """What a source has now."""

    text: str | None  # None: there is no document, or a failure
    failure: str = ""


class DocumentSource(ABC):
    """`document` is the last one that was understood. One with a lower revision (a deposed leader's), a bad one, or
    none at all does not replace it: `problem` then says what is wrong with what is there now, and the caller holds."""

    def __init__(self, name: str) -> None:
        self.document: ControlDocument | None = None
        self.problem = ""  # empty: none
        self._name = name  # of the source, in messages
        self._seen: Found | None = None

    @abstractmethod
    def look(self) -> Found:
        """Never blocks, never raises."""

    def refresh(self) -> bool:
        """Whether another document is in force than before. Never blocks, never raises."""
        found = self.look()
        if found == self._seen:
            return False
        self._seen = found
        try:
            document = self._understand(found)
        except ControlDocumentError as error:
            self._complain(f"{self._name}: {error}")
            return False
        self.problem = ""
        changed, self.document = self.document != document, document
        return changed

    def _understand(self, found: Found) -> ControlDocument:
        if found.text is None:
            raise ControlDocumentError(found.failure or "there is none with a control document")
        document = parse_control_document(found.text)
        if self.document is not None and document.revision < self.document.revision:
            raise ControlDocumentError(
                f"revision {document.revision} is older than {self.document.revision}, which stays in force"
            )
        return document

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem


class DocumentFile(DocumentSource):
    """A file, for instance of a mounted ConfigMap."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"control_file={str(path)!r}")
        self.path = path

    def look(self) -> Found:
        try:
            return Found(self.path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            return Found(None, f"{self.path} cannot be read: {error}")
