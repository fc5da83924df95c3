//! PDFs as attachments: their text goes with the message.

use serde_json::{Value, json};

use crate::tab::Tab;
use crate::{complete, on_page, send};

/// A PDF that the browser prints of a page with this body, in base64.
fn printed(tab: &Tab, body: &str) -> Value {
    let printer = tab.beside();
    printer.call("Page.navigate", json!({ "url": format!("data:text/html;charset=utf-8,{body}") }));
    printer.wait("document.readyState === 'complete'");
    printer.call("Page.printToPDF", json!({ "displayHeaderFooter": false }))["data"].clone()
}

/// Picks a file with these bytes, in base64.
fn attach(tab: &Tab, name: &str, base64: &Value) {
    tab.eval(&format!(
        "(() => {{
            const field = document.querySelector('#pick-files');
            const transfer = new DataTransfer();
            transfer.items.add(new File([Uint8Array.from(atob({base64}), (char) => char.charCodeAt(0))], {}));
            field.files = transfer.files;
            field.dispatchEvent(new Event('change'));
        }})()",
        json!(name)
    ));
}

fn base64(text: &str) -> Value {
    use base64::Engine;
    json!(base64::engine::general_purpose::STANDARD.encode(text))
}

#[test]
fn the_text_of_a_pdf_goes_with_the_message() {
    on_page(|site, tab| {
        let body = "<h1>Quarterly r%C3%A9port</h1><p>Profits rose to 5%E2%82%AC.<br>Costs fell.</p>\
            <p style='break-before:page'>The second page.</p>";
        let pdf = printed(tab, body);
        attach(tab, "report.pdf", &pdf);
        tab.wait_text("#attached", "report.pdf");
        let asked = send(site, tab, "What does it say?");
        let content = asked.body["messages"][0]["content"].as_str().unwrap();
        let text = "What does it say?\n\nreport.pdf:\n```\nQuarterly réport\nProfits rose to 5€.\nCosts fell.\n\nThe second page.\n```";
        let lines = |text: &str| text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(lines(content), lines(text), "{content}");
        complete(tab, asked.answer(), "Good news");
    });
}

#[test]
fn a_plain_pdf_with_coded_glyphs_is_read() {
    on_page(|site, tab| {
        // Without a table of objects, and with a font whose codes have names.
        let page = "%PDF-1.4\n1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj\n2 0 obj <</Type/Pages/Kids[3 0 R]/Count 1>> endobj\n\
            3 0 obj <</Type/Page/Parent 2 0 R/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>> endobj\n\
            4 0 obj <</Length 96>>\nstream\nBT /F1 12 Tf 50 700 Td (o\\001ce \\(sic\\)) Tj 0 -14 Td [(two) -400 <776f726473>] TJ ET\nendstream endobj\n\
            5 0 obj <</Type/Font/Subtype/Type1/Encoding<</Differences[1/ffi]>>>> endobj\n";
        attach(tab, "plain.PDF", &base64(page));
        tab.wait_text("#attached", "plain.PDF");
        let asked = send(site, tab, "Read");
        let content = asked.body["messages"][0]["content"].as_str().unwrap();
        assert!(content.contains("office (sic)\ntwo words"), "{content}");
        complete(tab, asked.answer(), "Done");
    });
}

#[test]
fn a_pdf_without_text_says_why() {
    on_page(|_, tab| {
        let picture = printed(tab, "<div style='width:9cm;height:9cm;border:1cm solid'></div>");
        attach(tab, "scan.pdf", &picture);
        tab.wait_text(".toast", "scan.pdf has no text: its pages are probably scanned pictures.");
        let locked = "%PDF-1.7\n1 0 obj <</Type/Catalog>> endobj\ntrailer <</Root 1 0 R/Encrypt 9 0 R>>";
        attach(tab, "secret.pdf", &base64(locked));
        tab.wait_text(".toast", "secret.pdf is encrypted: save it without a password first.");
        attach(tab, "fake.pdf", &base64("just words"));
        tab.wait_text(".toast", "fake.pdf is not a PDF.");
        // Values without an end, and pages that contain themselves.
        let nested = format!(
            "%PDF-1.4\n1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj\n2 0 obj <</Kids[2 0 R]/A {}>> endobj",
            "[".repeat(500)
        );
        attach(tab, "nested.pdf", &base64(&nested));
        tab.wait_text(".toast", "nested.pdf");
        assert_eq!(tab.eval("document.querySelector('#attached').hidden"), true);
    });
}
