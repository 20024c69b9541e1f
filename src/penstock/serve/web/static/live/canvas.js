// Canvases in CSS pixels.

/** Prepare a canvas for drawing; returns [context, width, height]. */
export function prepare(canvas, height = canvas.clientHeight) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}
