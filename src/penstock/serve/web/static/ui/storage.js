// Settings that the browser stores. If it refuses storage, they last until the page is closed.

const memory = new Map();

/** The stored value of a name, or `otherwise`. */
export function stored(name, otherwise = null) {
  try {
    return JSON.parse(localStorage.getItem(`penstock-${name}`)) ?? otherwise;
  } catch {
    return memory.get(name) ?? otherwise;
  }
}

export function store(name, value) {
  memory.set(name, value);
  try {
    localStorage.setItem(`penstock-${name}`, JSON.stringify(value));
  } catch {
    // kept in memory
  }
}
