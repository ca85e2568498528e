// The least contrast (WCAG 2) of a text with what is painted below it: of words, and of the numbers beside them.
() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const style = (element) => getComputedStyle(element);
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);

  function luminance(layers) {  // colour and opacity, the lowest first
    for (const [colour, opacity] of layers) {
      canvas.globalAlpha = opacity;
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((x) => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  function contrast(below, text) {
    const [low, high] = [luminance(below), luminance([...below, text])].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  }

  const least = { word: Infinity, number: Infinity };
  for (const text of document.querySelectorAll('#tree .node text')) {
    const fills = [...text.parentNode.querySelectorAll('rect')].map(style).filter(({ fill }) => fill !== 'none');
    const kind = text.classList.contains('number') ? 'number' : 'word', { fill, fillOpacity } = style(text);
    const below = fills.map((one) => [one.fill, +one.fillOpacity]);
    least[kind] = Math.min(least[kind], contrast(below, [fill, +fillOpacity]));
  }
  const back = [style(document.body).backgroundColor, 1];
  const card = [style(document.getElementById('said')).backgroundColor, 1];
  const around = [['#where, #what, #key span', [back]], ['#said span', [back, card]]];
  for (const [selector, below] of around) {
    for (const text of document.querySelectorAll(selector)) {
      least.word = Math.min(least.word, contrast([...below, [style(text).backgroundColor, 1]], [style(text).color, 1]));
    }
  }
  return least;
}
