"""The picture in README.md equals the output of its script, with the figures of the pages."""

import memory_picture as tool


def test_the_picture_is_what_its_script_draws() -> None:
    """The picture in the repository equals what its script draws from the page's figures. `make pages` draws it again."""
    assert tool.IMAGE.read_text(encoding="utf-8") == tool.draw()


def test_the_readme_tells_the_figures_of_the_picture() -> None:
    """README.md repeats the first figures of the picture as text, for readers who cannot see the picture."""
    _, _, card = tool.panels()[0]
    sizes = [tool.size(sum(part for _, part in bar)) for bar in card.values()]
    text = (tool.DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert (
        f"{sizes[0]} of GPU memory with Triton's Python backend, {sizes[1]} with its ONNX Runtime backend, {sizes[2]} in rsrv"
        in text
    )
