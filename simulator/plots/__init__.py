"""Pictures of results: each function takes results (or the rows that an earlier picture was saved with) and
returns ``(figure, axes)``. Nothing here simulates; matplotlib is imported when a picture is drawn.

``roofline``, ``io`` (bytes), ``scale`` and ``timeline`` are one picture each; ``style`` is what they share and
``rows`` reads and writes the CSV beside a picture.
"""
