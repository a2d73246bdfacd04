"""Pipe x data x model: does it compute what one device computes, and what does each axis communicate?"""
