"""tcil inside other frameworks, one module each. A module needs its framework only when it is imported.

    from tcil.integrations.avalanche import CalibrationPlugin          (extra tcil[avalanche])
    from tcil.integrations.lightning import CalibrationCallback        (extra tcil[lightning])
    from tcil.integrations import onnx as tcil_onnx                    (extra tcil[onnx])
    from tcil.integrations import pycil                                (a checkout of PyCIL)
    from tcil.integrations import transformers as tcil_transformers    (extra tcil[transformers])

docs/integrations.md has a script for each, and recipes for FACIL and Mammoth.
"""
