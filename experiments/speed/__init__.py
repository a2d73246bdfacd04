"""How fast is a pipelined step, and where does its time go?"""
