"""``iosim report``: one self-contained HTML page with everything that a comparison says, to click through or print.

``page`` puts it together, ``sections`` writes its parts, ``report.html``, ``report.css`` and ``report.js`` are what
the page is made of. Nothing is loaded from a network; without JavaScript the page shows everything.
"""
