"""Parts of reports that the tools share: figures, statistics, SVG, pages, progress."""
