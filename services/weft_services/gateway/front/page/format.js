// Formats numbers for people, and builds elements without markup.

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(Math.round(n));

export const compact = (n) => {
  if (n < 10000) return count(n);
  return n < 1e6 ? `${(n / 1e3).toFixed(n < 1e5 ? 1 : 0)} k` : `${(n / 1e6).toFixed(1)} M`;
};

export const milliseconds = (ms) => {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
};

export const bytes = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1000 && at < units.length - 1) { n /= 1024; at += 1; }
  return `${at && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
};

export const percent = (share) => `${Math.round(share * 100)} %`;

// element("dl", {class: "x", hidden: true}, child, "text", ...): sets the property if the element has one
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function drawing(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);
