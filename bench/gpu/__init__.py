"""What a big GPU is asked: right answers in CUDA graphs, and ms a pass of the 26B-A4B shape.

__main__   three calls of a few minutes each, and what each starts
engine     one engine of that shape, in a process that outlives a call
weights    dummy weights with which a model computes what a trained one does
report     what the engines have measured, and the time by kind of kernel
pack       archives of what that machine lacks, with less GPU code (cubins)
run.sh     a call on a machine that has no network (README.md)
"""
