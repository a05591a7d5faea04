"""Every network of the zoo."""

from __future__ import annotations

from zoo import language, others, vision

ENTRIES = {entry.name: entry for entry in (*language.ENTRIES, *vision.ENTRIES, *others.ENTRIES)}
