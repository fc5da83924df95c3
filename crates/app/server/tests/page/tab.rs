//! One page in the browser, with its own storage: clicks, types and inspects it.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::chromium::Chromium;

/// If the page does not reach the expected state in this time, the test fails.
const WAIT_MS: u32 = 100_000;

pub struct Tab {
    browser: Arc<Chromium>,
    context: String,
    owns_context: bool,
    session: String,
    /// Parts of console errors that the test expects.
    expected: Vec<&'static str>,
}

impl Tab {
    /// A page, if there is a browser.
    pub fn new() -> Option<Self> {
        let browser = Chromium::shared()?;
        let call = |session: Option<&str>, method: &str, params| browser.call(session, method, params).expect(method);
        let context = text(&call(None, "Target.createBrowserContext", json!({}))["browserContextId"]);
        Some(Self::in_context(browser, context, true))
    }

    /// Another page with the same storage.
    pub fn beside(&self) -> Self {
        Self::in_context(Arc::clone(&self.browser), self.context.clone(), false)
    }

    fn in_context(browser: Arc<Chromium>, context: String, owns_context: bool) -> Self {
        let call = |session: Option<&str>, method: &str, params| browser.call(session, method, params).expect(method);
        let window = json!({ "url": "about:blank", "browserContextId": context, "width": 1200, "height": 800, "newWindow": true });
        let target = text(&call(None, "Target.createTarget", window)["targetId"]);
        let attach = json!({ "targetId": target, "flatten": true });
        let session = text(&call(None, "Target.attachToTarget", attach)["sessionId"]);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            call(Some(&session), domain, json!({}));
        }
        call(Some(&session), "Emulation.setFocusEmulationEnabled", json!({ "enabled": true }));
        let tab = Self { browser, context, owns_context, session, expected: Vec::new() };
        tab.resize(1200, 800, false);
        tab
    }

    pub fn call(&self, method: &str, params: Value) -> Value {
        self.browser.call(Some(&self.session), method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// Opens an address and waits until the page has started.
    pub fn open(&self, address: &str) {
        self.call("Page.navigate", json!({ "url": address }));
        self.wait("document.documentElement.dataset.started !== undefined");
    }

    pub fn reload(&self) {
        self.eval("window.before = true");
        self.call("Page.reload", json!({}));
        self.wait("window.before === undefined && document.documentElement.dataset.started !== undefined");
    }

    /// The value of an expression; promises are awaited.
    pub fn eval(&self, expression: &str) -> Value {
        // The last option makes `eval` obey the page's content security policy.
        let params = json!({
            "expression": expression, "awaitPromise": true, "returnByValue": true, "userGesture": true,
            "allowUnsafeEvalBlockedByCSP": false,
        });
        let result = self.call("Runtime.evaluate", params);
        let failed = &result["exceptionDetails"];
        assert!(failed.is_null(), "{expression}\n{}", failed["exception"]["description"]);
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true. An exception counts as false.
    pub fn wait(&self, expression: &str) -> Value {
        let quoted = json!(expression);
        let script = format!(
            "new Promise((resolve, reject) => {{
                const end = performance.now() + {WAIT_MS};
                (function look() {{
                    let value = null;
                    try {{ value = ({expression}); }} catch {{}}
                    if (value) resolve(value);
                    else if (performance.now() > end) reject(new Error('never came true: ' + {quoted} + '\\n' + document.body?.innerText));
                    else setTimeout(look, 10);
                }})();
            }})"
        );
        // A navigation drops the promise: then the next page is evaluated.
        for _ in 0..3 {
            let params = json!({ "expression": script, "awaitPromise": true, "returnByValue": true });
            match self.browser.call(Some(&self.session), "Runtime.evaluate", params) {
                Ok(result) if result["exceptionDetails"].is_null() => return result["result"]["value"].clone(),
                Ok(result) => panic!("{}", result["exceptionDetails"]["exception"]["description"]),
                Err(error) if error.contains("navigat") || error.contains("context") => {}
                Err(error) => panic!("{expression}: {error}"),
            }
        }
        panic!("the page keeps going elsewhere while waiting for {expression}");
    }

    /// Waits until the text of an element contains `part`.
    pub fn wait_text(&self, selector: &str, part: &str) {
        self.wait(&format!("document.querySelector({}).textContent.includes({})", json!(selector), json!(part)));
    }

    pub fn text(&self, selector: &str) -> String {
        text(&self.eval(&format!("document.querySelector({}).textContent", json!(selector))))
    }

    pub fn count(&self, selector: &str) -> u64 {
        self.eval(&format!("document.querySelectorAll({}).length", json!(selector))).as_u64().unwrap()
    }

    /// Clicks in the middle of an element, which must not be covered by another.
    pub fn click(&self, selector: &str) {
        let point = self.middle(selector);
        for kind in ["mousePressed", "mouseReleased"] {
            let params = json!({ "type": kind, "x": point[0], "y": point[1], "button": "left", "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", params);
        }
    }

    /// Waits until the middle of an element is on show, and returns it.
    fn middle(&self, selector: &str) -> Value {
        let quoted = json!(selector);
        self.wait(&format!(
            "(() => {{
                const element = document.querySelector({quoted});
                element.scrollIntoView({{ block: 'nearest', behavior: 'instant' }});
                const box = element.getBoundingClientRect();
                const x = box.x + box.width / 2, y = box.y + box.height / 2;
                const hit = document.elementFromPoint(x, y);
                return box.width > 0 && hit && (element.contains(hit) || hit.contains(element)) && [x, y];
            }})()"
        ))
    }

    /// Types into the focused element.
    pub fn write(&self, text: &str) {
        self.call("Input.insertText", json!({ "text": text }));
    }

    /// Touches the middle of an element, which must not be covered by another.
    pub fn tap(&self, selector: &str) {
        let point = self.middle(selector);
        self.tap_at(point[0].as_f64().unwrap(), point[1].as_f64().unwrap());
    }

    pub fn tap_at(&self, x: f64, y: f64) {
        let points = json!([{ "x": x, "y": y }]);
        self.call("Input.dispatchTouchEvent", json!({ "type": "touchStart", "touchPoints": points }));
        self.call("Input.dispatchTouchEvent", json!({ "type": "touchEnd", "touchPoints": [] }));
    }

    /// Presses a key, optionally with the prefixes `Control+` and `Shift+`, in this order.
    pub fn press(&self, key: &str) {
        let (control, key) = key.strip_prefix("Control+").map_or((0, key), |key| (2, key));
        let (shift, key) = key.strip_prefix("Shift+").map_or((control, key), |key| (control + 8, key));
        let (code, number, typed) = match key {
            "Enter" => ("Enter", 13, "\r"),
            "Tab" => ("Tab", 9, ""),
            "Escape" => ("Escape", 27, ""),
            " " => ("Space", 32, " "),
            "k" => ("KeyK", 75, ""),
            "O" => ("KeyO", 79, ""),
            "?" => ("Slash", 191, "?"),
            "ArrowRight" => ("ArrowRight", 39, ""),
            other => panic!("the key {other} is not in the table"),
        };
        let mut params = json!({ "key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": shift });
        params["type"] = json!(if typed.is_empty() { "rawKeyDown" } else { "keyDown" });
        if !typed.is_empty() {
            params["text"] = json!(typed);
        }
        self.call("Input.dispatchKeyEvent", params.clone());
        params["type"] = json!("keyUp");
        self.call("Input.dispatchKeyEvent", params);
    }

    /// Sets a field's value as typing does.
    pub fn fill(&self, selector: &str, value: &str) {
        self.eval(&format!(
            "(() => {{ const field = document.querySelector({}); field.focus(); field.select?.(); }})()",
            json!(selector)
        ));
        self.write(value);
    }

    pub fn resize(&self, width: u32, height: u32, mobile: bool) {
        let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile });
        self.call("Emulation.setDeviceMetricsOverride", metrics);
        self.call("Emulation.setTouchEmulationEnabled", json!({ "enabled": mobile }));
    }

    /// Emulates the system's colour scheme: `light` or `dark`.
    pub fn prefer(&self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features }));
    }

    /// Expects console errors that contain `part`.
    pub fn expect_error(&mut self, part: &'static str) {
        self.expected.push(part);
    }

    /// Checks that no script failed and nothing was blocked: policy violations are logged as errors.
    pub fn assert_quiet(&self) {
        let thrown = self.browser.events(&self.session, "Runtime.exceptionThrown");
        assert!(thrown.is_empty(), "a script failed: {thrown:#?}");
        let logged =
            self.browser.events(&self.session, "Log.entryAdded").into_iter().map(|event| event["entry"].clone());
        let written = self.browser.events(&self.session, "Runtime.consoleAPICalled");
        let errors: Vec<String> = logged
            .filter(|entry| entry["level"] == "error")
            .chain(written.into_iter().filter(|entry| entry["type"] == "error"))
            .map(|entry| entry.to_string())
            .filter(|entry| !self.expected.iter().any(|part| entry.contains(part)))
            .collect();
        assert!(errors.is_empty(), "the console has errors: {errors:#?}");
    }

    /// Saves a screenshot if CONSORT_PAGE_PICTURES is set.
    pub fn picture(&self, name: &str) {
        let Some(folder) = std::env::var_os("CONSORT_PAGE_PICTURES") else { return };
        let image = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        let bytes = decode_base64(image["data"].as_str().unwrap());
        std::fs::write(std::path::Path::new(&folder).join(format!("{name}.png")), bytes).unwrap();
    }
}

impl Drop for Tab {
    fn drop(&mut self) {
        if !self.owns_context {
            return;
        }
        let _ = self.browser.call(None, "Target.disposeBrowserContext", json!({ "browserContextId": self.context }));
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("not text: {value}")).to_owned()
}

fn decode_base64(text: &str) -> Vec<u8> {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.decode(text).unwrap()
}
