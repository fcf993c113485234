"""A rewritten model as a folder of Python that needs torch only.

    out/ memrewrite_model.py    apply(model) -> drop-in: the runtime and the generated forward
         constants.pt           tensors the model made from Python values, if any
         weights.safetensors    on request
         report.json            what was done, refused, predicted, measured and proved
         manifest.json          schema, SHA-256 of every other file, versions, budget, peaks

``save`` writes it whole or not at all; ``load`` checks it and applies it to a model.
"""
