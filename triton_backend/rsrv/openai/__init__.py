"""`rsrv openai`: endpoints in the form of OpenAI's, Cohere's and vLLM's, in front of a server or a gateway.

The process calls models over KServe v2 (gRPC) as any client does. It learns which model does which task from the parameter
`task` of Triton's model configuration.
"""
