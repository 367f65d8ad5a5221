// Shows /openapi.json in the vendored Swagger UI; nothing is loaded from elsewhere.
const ui = window.SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: false,
  tryItOutEnabled: true,
  validatorUrl: null,
  defaultModelsExpandDepth: 0,
});
window.ui = ui;
