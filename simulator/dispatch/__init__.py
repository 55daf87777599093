"""Which attention kernel a framework really runs: rules as versioned data, and one interpreter for them.

``rules/*.yaml`` say in which order a framework tries its backends and what each refuses; ``decide`` reads them over
named facts of a call and a GPU. A new framework or version is a new YAML file.
"""
