"""Write tests/results/sentences.md: what wrong and unsupported calls say. See tests/sentences."""

from __future__ import annotations

from tests.sentences.table import DOCUMENT, document

if __name__ == "__main__":
    DOCUMENT.write_text(document())
