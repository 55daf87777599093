"""Design spaces: which points, how each is simulated, who simulates them, and how nothing is lost.

``read_spec`` makes a :class:`~simulator.sweep.spec.Spec` of a YAML file, ``designs.points_of`` its points,
``points.evaluate`` the row of one of them; ``runner.run_sweep`` does all of them on processes or a Dask cluster.
"""
