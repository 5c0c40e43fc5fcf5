"""Fields of a body that this server does not know: they are named in a header and once in the log, or refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence

from trioengine.core.wording import did_you_mean
from trioengine.serve.http import Headers
from trioengine.serve.parsing import unknown

logger = logging.getLogger("trioengine")
HEADER = b"x-unknown-fields"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # that a header and a log can have
_MOST_SHOWN = 16  # names in a header
_MOST_LOGGED = 256  # names in all


class UnknownFields:
    """Reports the names of such fields, to the log once each, or refuses them."""

    def __init__(self, *, refuse: bool) -> None:
        self._refuse = refuse
        self._logged: set[str] = set()

    def report(self, names: Sequence[str], known: Collection[str], prefix: str = "") -> Headers:
        """Return the headers for a response to a body with these fields, where others are `known`.

        `prefix` is the path of the object that has them, with a point at its end. Raises ClientError for the first
        name if such fields are refused.
        """
        if not names:
            return ()
        if self._refuse:
            raise unknown("field", names[0], known, prefix)
        shown = [name if _NAME.fullmatch(name) else "?" for name in names]
        for name in shown:
            path = prefix + name
            if path not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(path)
                hint = did_you_mean(name, known, prefix)
                logger.warning("clients send the field %r, which has no effect here%s", path, hint)
        return ((HEADER, ", ".join(shown[:_MOST_SHOWN]).encode()),)
