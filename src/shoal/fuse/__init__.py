"""Layers recognised by what they compute, proved, and run as a few kernel calls. Import its files, not the
package; of those that compute, importing imports numba.
"""
