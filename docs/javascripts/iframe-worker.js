/* Browsers start no worker for a page that is opened as a file. There the worker of the search runs in
   a hidden frame instead. Material's plugin "offline" knows this file by its name. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.append(this.frame)
      const inside = this.frame.contentWindow
      // What the script posts, it posts to the frame's window.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = new URL(url, document.baseURI)
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve))
      inside.document.documentElement.append(script)
    }
    async postMessage(data) {
      await this.loaded
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
