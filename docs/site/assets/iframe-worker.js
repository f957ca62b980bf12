// A page that is opened from a disk may start no worker, which the search is: there its script runs in a hidden frame.
// The theme's plugin `offline` looks for a script of this name, and for the class; else it loads one from the network.
"use strict";

window.IFrameWorker = class extends EventTarget {
  #ready;

  constructor(address) {
    super();
    const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
    this.window = frame.contentWindow;
    const load = (url) => new Promise((done) => {
      const script = Object.assign(this.window.document.createElement("script"), { src: url, onload: done });
      this.window.document.body.append(script);
    });
    this.window.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve());
    this.#ready = load(new URL(address, location.href).href);
  }

  postMessage(data) {
    this.#ready.then(() => this.window.dispatchEvent(new MessageEvent("message", { data })));
  }
};
if (location.protocol === "file:") window.Worker = window.IFrameWorker;
