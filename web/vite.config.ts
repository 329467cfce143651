import { defineConfig } from "vite";

// File names without hashes: the server answers with an ETag, and a change of one line of the
// sources changes one file of the repository.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../src/luyen/web/page",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        entryFileNames: "studio.js",
        chunkFileNames: "[name].js",
        assetFileNames: "studio[extname]",
      },
    },
  },
  server: {
    proxy: { "/api": process.env.LUYEN_STUDIO ?? "http://127.0.0.1:8799" },
  },
});
