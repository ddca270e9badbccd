"""The models that weft is held to, in PyTorch: each once, written from the formulas of docs/models, under the released names.

stdit3, rflow               Open-Sora's STDiT3; training loss and sampler of rectified flow
vae, t5, captions           its VAE (2D by diffusers) and what it is trained for; T5 by transformers; the cleaning of captions
segmentation                encoders and decoders; segmentation_original: the original's own code, where it is at hand
dbnet, text_loss            the text detector and its loss
sadtalker, face, gfpgan     talking heads: renderer and speech, faces, restoration; sadtalker_chain: from picture and speech to
                            frames; sadtalker_inputs: a face, speech and weights, all drawn
philox                      weft's random numbers
weights                     drawing and loading of weights
safetensors_io              the files that both sides read
"""
