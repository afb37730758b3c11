// How the page's JavaScript is to read. Names and types are tsc's part (tsconfig.json), the format is prettier's.
const readable = {
  "array-callback-return": "error",
  "consistent-return": "off", // a handler may return early with nothing
  curly: ["error", "multi-line", "consistent"],
  "default-case-last": "error",
  eqeqeq: ["error", "always", { null: "ignore" }],
  "no-else-return": "error",
  "no-sequences": ["error", { allowInParentheses: false }],
  "no-unneeded-ternary": "error",
  "no-useless-return": "error",
  "no-var": "error",
  "object-shorthand": "error",
  "one-var": ["error", "never"],
  "prefer-const": "error",
  "prefer-template": "off",
};

export default [
  { ignores: ["**/node_modules/", "**/.venv/", "build/", "dist/"] },
  {
    files: ["cbviz/app/**/*.js", "tests/js/*.mjs"],
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: { ...readable },
  },
];
