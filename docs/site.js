/* Of the site that `make docs` builds. Browsers start no Worker for pages that are opened as files; the search wants one: it gets
   an iframe in which its script runs. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      const load = (source) => new Promise((done, failed) => {
        const script = frame.contentDocument.createElement("script");
        script.src = source;
        script.onload = done;
        script.onerror = failed;
        frame.contentDocument.documentElement.append(script);
      });
      this.inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(new URL(source, url))), Promise.resolve());
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
